"""The kernels of a step but attention, compiled ahead of time: within their budgets, no spills."""

from __future__ import annotations

import pytest

from tests.aot import ARCHS, Compiled, compile_all
from tests.kernels.budgets import excesses, key, load
from tests.kernels.step_jobs import KERNELS, step_jobs


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[str, str], Compiled]:
    """Every kernel for every architecture."""
    jobs = {(name, arch): job for arch in ARCHS for name, job in step_jobs(arch)}
    return dict(zip(jobs, compile_all(list(jobs.values())), strict=True))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", KERNELS)
def test_within_budget(name: str, arch: str, compiled: dict[tuple[str, str], Compiled]) -> None:
    assert not excesses({key(name, arch): compiled[name, arch]}, load())
    assert compiled[name, arch].stack == 0


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("dtype", "vectors"), [("fp32", 4), ("bf16", 2)])
def test_greedy_loads_whole_vectors(
    dtype: str, vectors: int, arch: str, compiled: dict[tuple[str, str], Compiled]
) -> None:
    """16 logits of a thread come in 16-byte loads, but for the masked last block."""
    masked = 16
    assert compiled[f"greedy-{dtype}", arch].instructions["LDG"] == vectors + masked


@pytest.mark.parametrize("arch", ARCHS)
def test_pack_loads_whole_vectors(arch: str, compiled: dict[tuple[str, str], Compiled]) -> None:
    """16 values of a thread come in two 16-byte loads, and leave, with rows of 260 bytes, in eight
    4-byte stores; one more of each for the LSE."""
    instructions = compiled["pack", arch].instructions
    assert (instructions["LDG"], instructions["STG"]) == (2 + 1, 8 + 1)
