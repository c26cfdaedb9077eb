"""Assertions about captured programs, for the tests of any project.

Import what you need, or put `pytest_plugins = ["graphattn.testing"]` into a conftest.py and take
the fixtures of the same names. Nothing here needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from graphattn._capture.allocations import Allocations
from graphattn._capture.poison import poison
from graphattn._capture.source import user_line
from graphattn.checks import audit, verify
from graphattn.graph import Graph
from graphattn.parity import Verdict, compare

__all__ = [
    "Verdict",
    "assert_no_host_reads",
    "assert_replay_matches",
    "assert_same_tokens",
    "no_allocation",
    "poison",
]


def assert_no_host_reads(
    fn: Callable[..., Any], *args: Any, advance: Callable[[], object] | None = None
) -> None:
    """`fn(*args)` holds nothing that a CUDA graph cannot: see `graphattn.audit`, which names each
    line otherwise."""
    report = audit(fn, *args, advance=advance)
    if not report.ok:
        raise AssertionError(str(report))


def assert_replay_matches(
    graph: Graph,
    *,
    inputs: Callable[[int], None],
    watch: Mapping[str, Tensor],
    steps: int = 20,
    poison: Callable[[], None] | None = None,
) -> None:
    """Replays of `graph` equal its program run eagerly, bit for bit: see `graphattn.verify`."""
    report = verify(graph, inputs=inputs, watch=watch, steps=steps, poison=poison)
    if not report.ok:
        raise AssertionError(str(report))


def assert_same_tokens(
    model: Any,
    prompt: Iterable[int],
    wanted: Iterable[int],
    got: Iterable[int],
    *,
    near_ties: bool = False,
) -> Verdict:
    """Greedy tokens `got` of a transformers `model` equal those `wanted` for the same prompt.

    With `near_ties`, a first difference is accepted where rounding can explain it; the verdict
    returned says so, for a caller that counts and bounds them.
    """
    verdict = compare(model, tuple(prompt), tuple(wanted), tuple(got))
    if not (verdict.equal or (near_ties and verdict.near_tie)):
        raise AssertionError(str(verdict))
    return verdict


@contextmanager
def no_allocation(device: torch.device | str = "cpu") -> Iterator[None]:
    """Within the block no memory is taken that outlives it.

    On CUDA not even in between: the caching allocator's counters stand still. On a CPU operations
    may make intermediates, but none may be kept; the error names the lines that made them.
    """
    if torch.device(device).type == "cuda":
        before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
        yield
        count = torch.cuda.memory_stats(device)["allocation.all.allocated"] - before
        if count:
            raise AssertionError(f"{count} allocations on {device}")
        return
    allocations = Allocations(user_line)
    with allocations:
        yield
    if kept := allocations.kept():
        lines = "\n".join(f"{size} bytes kept from {place}" for place, size in kept.items())
        raise AssertionError(lines)


@pytest.fixture(name="assert_no_host_reads")
def _assert_no_host_reads() -> Callable[..., None]:
    return assert_no_host_reads


@pytest.fixture(name="assert_replay_matches")
def _assert_replay_matches() -> Callable[..., None]:
    return assert_replay_matches


@pytest.fixture(name="poison")
def _poison() -> Callable[..., None]:
    return poison


@pytest.fixture(name="no_allocation")
def _no_allocation() -> Callable[..., Any]:
    return no_allocation


@pytest.fixture
def fake_cuda() -> Iterator[SimpleNamespace]:
    """A fake CUDA device for the length of a test: models and buffers are made on it."""
    from graphattn._capture.audit import fake_cuda as device

    with device() as mode:
        yield SimpleNamespace(mode=mode, device=torch.device("cuda"))
