"""Grid sizes of persistent kernels, and strides as kernels take them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphattn.kernels import grid
from graphattn.kernels.strides import stride_unit


def test_stride_unit_is_the_common_alignment() -> None:
    assert stride_unit([128, 64, 4096]) == 16
    assert stride_unit([72, 720]) == 8
    assert stride_unit([80, 1, 0]) == 1
    assert stride_unit([0, 0]) == 16


def test_resident_blocks() -> None:
    """A Hopper multiprocessor; counts from its limits of registers, shared memory, threads."""
    sm = grid.Multiprocessor(registers=65536, shared=233472, threads=2048)
    assert sm.resident_blocks(registers=140, shared=39424, warps=4) == 3
    assert sm.resident_blocks(registers=96, shared=39424, warps=4) == 5
    assert sm.resident_blocks(registers=255, shared=57856, warps=4) == 2
    assert sm.resident_blocks(registers=32, shared=100_000, warps=4) == 2
    assert sm.resident_blocks(registers=16, shared=0, warps=8) == 8
    assert sm.resident_blocks(registers=255, shared=230_000, warps=16) == 1


class Kernel:
    """A jit function as far as the grid is concerned."""

    __name__ = "kernel"

    def __init__(self) -> None:
        self.compilations = 0

    def warmup(self, *args: Any, grid: tuple[int, ...], **constants: Any) -> Any:
        self.compilations += 1
        metadata = SimpleNamespace(shared=39424, num_warps=constants["num_warps"])
        return SimpleNamespace(n_regs=140, metadata=metadata, run=None)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU of 132 Hopper multiprocessors that is not there."""
    properties = SimpleNamespace(
        regs_per_multiprocessor=65536,
        shared_memory_per_multiprocessor=233472,
        max_threads_per_multi_processor=2048,
        multi_processor_count=132,
    )
    monkeypatch.setattr(grid, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return torch.device("cuda", 0)


def test_a_grid_is_found_once_per_compiled_shape(device: torch.device) -> None:
    """Another bucket passes other tensors and integers, and must compile nothing."""
    grids, kernel = grid.ResidentGrids(), Kernel()
    shapes = [{"BLOCK": 16, "num_warps": 4}, {"BLOCK": 64, "num_warps": 8}]
    found = [
        grids.programs(kernel, device, [torch.empty(tokens), tokens], constants)
        for tokens in (1, 16, 7)
        for constants in shapes
    ]
    assert found == [132 * 3, 132] * 3
    assert kernel.compilations == 2
    grids.programs(kernel, device, [torch.empty(1, dtype=torch.bfloat16), 1], shapes[0])
    assert kernel.compilations == 3


def test_nothing_is_compiled_inside_a_capture(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    grids, kernel, constants = grid.ResidentGrids(), Kernel(), {"num_warps": 4}
    warm = grids.programs(kernel, device, [torch.empty(1)], constants)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert grids.programs(kernel, device, [torch.empty(9)], constants) == warm
    with pytest.raises(RuntimeError, match=r"kernel was not compiled for .* before the capture"):
        grids.programs(kernel, device, [torch.empty(9)], {"num_warps": 8})
    assert kernel.compilations == 1
