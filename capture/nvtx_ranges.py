"""NVTX ranges and counters of the domain "graphattn", free when no tool listens.

Ranges that are open while a graph is captured are projected onto its nodes by the profiler;
ranges around a replay are host ranges. Whether an NVTX tool listens is decided when the first range
is made, as NVTX does itself. torch.profiler gets the same ranges while it runs, as
"graphattn/NAME"; it has no counters.

    with scope("attend.3"): ...        # what belongs to a name is built once
    send = within("copy_in", send)     # a range around each call
    count("live_rows", 8)

What is named, one inside the other (docs/profiling.md):

    capture.BUCKET                     a capture; inside it, and inside every eager step:
      admit prepare model sample commit draft            the stages
        layer.N                        of the model, and of a drafter
          attend.N, attend_latent.N    KV write, attention, combine over DCP ranks
    replay.BUCKET                      a step of an engine on the host
      copy_in, copy_out                of the input block, of the output block
    wait                               the host waits for the oldest step in flight

Counters, as marks that carry their value: live_rows and pages_taken when a step is launched,
emitted_tokens and accepted_tokens (drafts among them) when one is read.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from importlib import import_module
from types import TracebackType
from typing import Any, TypeVar, TypeVarTuple

from torch._C._autograd import _profiler_enabled
from torch._C._profiler import _RecordFunctionFast

DOMAIN = "graphattn"

Arguments = TypeVarTuple("Arguments")
T = TypeVar("T")


@cache
def _domain() -> Any:
    """None without the package: a machine with no more than torch and triton runs all the same."""
    try:
        nvtx = import_module("nvtx")
    except ImportError:
        return None
    return nvtx.get_domain(DOMAIN)


@cache
def enabled() -> bool:
    """Whether an NVTX tool listens."""
    return type(_domain()).__name__ not in ("DummyDomain", "NoneType")


def listening() -> bool:
    """Whether anybody does: an NVTX tool, or torch.profiler now."""
    return enabled() or _profiler_enabled()


def scope(name: str) -> AbstractContextManager[None]:
    """A range around a `with` block."""
    return _Profiled(name) if _profiler_enabled() else _nvtx_scope(name)


def within(name: str, function: Callable[[*Arguments], T]) -> Callable[[*Arguments], T]:
    """`function`, of positional arguments, with a range around every call of it; for hot loops."""
    nvtx_listens = enabled()

    @wraps(function)
    def named(*arguments: *Arguments) -> T:
        if nvtx_listens or _profiler_enabled():
            with scope(name):
                return function(*arguments)
        return function(*arguments)

    return named


def count(name: str, value: int) -> None:
    """The value of a counter from now on."""
    if enabled():
        _domain().mark(message=name, payload=value)


@cache
def _nvtx_scope(name: str) -> AbstractContextManager[None]:
    return _Scope(name) if enabled() else nullcontext()


class _Scope(AbstractContextManager[None]):
    def __init__(self, name: str) -> None:
        self._domain = _domain()
        self._attributes = self._domain.get_event_attributes(message=name)

    def __enter__(self) -> None:
        self._domain.push_range(self._attributes)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._domain.pop_range()


class _Profiled(AbstractContextManager[None]):
    """One range of torch.profiler, and of NVTX if its tool listens too. It is no operation that a
    recorder or an auditor would see."""

    def __init__(self, name: str) -> None:
        self._blocks = (_RecordFunctionFast(f"{DOMAIN}/{name}"), _nvtx_scope(name))

    def __enter__(self) -> None:
        for block in self._blocks:
            block.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for block in reversed(self._blocks):
            block.__exit__(kind, error, trace)
