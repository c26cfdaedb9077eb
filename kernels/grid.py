"""How many programs of a persistent kernel a device holds at once.

A kernel that loops over a work list is launched with exactly as many programs as are resident
together: fewer leave multiprocessors idle, more leave a late tail. The number follows from the
compiled kernel, so it is found once, at warm-up, and never inside a capture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

INTERPRETED: bool = triton.knobs.runtime.interpret
INTERPRETED_PROGRAMS = 3  # odd, so that items and heads fall on programs in every combination

_WARP_REGISTERS = 256  # registers are handed out to a warp in units of this
_WARPS_TOGETHER = 4  # and to warps in units of this: one per scheduler
_BLOCK_SHARED = 1024  # bytes of shared memory that the system takes per block


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What the blocks on one multiprocessor share."""

    registers: int
    shared: int  # bytes
    threads: int

    def resident_blocks(self, *, registers: int, shared: int, warps: int) -> int:
        """Blocks of a kernel with `registers` per thread and `shared` bytes that fit at once."""
        per_warp = -(-registers * 32 // _WARP_REGISTERS) * _WARP_REGISTERS
        fitting_warps = self.registers // per_warp // _WARPS_TOGETHER * _WARPS_TOGETHER
        return max(
            1,
            min(
                fitting_warps // warps,
                self.shared // (shared + _BLOCK_SHARED),
                self.threads // (32 * warps),
            ),
        )


@dataclass
class ResidentGrids:
    """Grid sizes of persistent kernels by device, kernel and compiled shape.

    It also holds the compiled kernels, so that no module is unloaded while a graph refers to it.
    """

    _found: dict[tuple[Any, ...], tuple[int, Any]] = field(default_factory=dict)

    def programs(
        self,
        kernel: Any,
        device: torch.device,
        args: Sequence[Any],
        constants: Mapping[str, Any],
    ) -> int:
        """Programs to launch `kernel` with; compiles and loads it at the first call.

        Raises `RuntimeError` when that first call comes while a stream is capturing.
        """
        if INTERPRETED:
            return INTERPRETED_PROGRAMS
        key = (device.index, kernel, _dtypes(args), tuple(constants.items()))
        if key not in self._found:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"{kernel.__name__} was not compiled for {constants} before the capture: "
                    "run the step once on the capture stream first"
                )
            compiled = kernel.warmup(*args, **constants, grid=(1,))
            compiled.run  # noqa: B018  loads the module, which tells the registers
            self._found[key] = (_programs(compiled, device), compiled)
        return self._found[key][0]


def _programs(compiled: Any, device: torch.device) -> int:
    properties: Any = torch.cuda.get_device_properties(device)  # its stub lacks the registers
    blocks = Multiprocessor(
        registers=properties.regs_per_multiprocessor,
        shared=properties.shared_memory_per_multiprocessor,
        threads=properties.max_threads_per_multi_processor,
    ).resident_blocks(
        registers=compiled.n_regs,
        shared=compiled.metadata.shared,
        warps=compiled.metadata.num_warps,
    )
    return int(properties.multi_processor_count) * blocks


def _dtypes(args: Sequence[Any]) -> tuple[torch.dtype, ...]:
    return tuple(arg.dtype for arg in args if isinstance(arg, torch.Tensor))
