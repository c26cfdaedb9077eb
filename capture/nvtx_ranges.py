"""NVTX ranges and counters of the domain "graphattn", free when no tool listens.

Ranges that are open while a graph is captured are projected onto its nodes by the profiler;
ranges around a replay are host ranges. Whether a tool listens is decided when the first range is
made, as NVTX does itself.

    with scope("attend.3"): ...        # what belongs to a name is built once
    send = within("copy_in", send)     # for hot loops: without a tool, `send` itself
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
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import nvtx

DOMAIN = "graphattn"

P = ParamSpec("P")
T = TypeVar("T")


@cache
def _domain() -> Any:
    return nvtx.get_domain(DOMAIN)


@cache
def enabled() -> bool:
    """Whether a tool listens."""
    return type(_domain()).__name__ != "DummyDomain"


@cache
def scope(name: str) -> AbstractContextManager[None]:
    """A range around a `with` block. The same object serves every use of the name."""
    return _Scope(name) if enabled() else nullcontext()


def within(name: str, function: Callable[P, T]) -> Callable[P, T]:
    """`function` with a range around every call of it; `function` itself if no tool listens."""
    if not enabled():
        return function
    block = scope(name)

    @wraps(function)
    def named(*args: P.args, **kwargs: P.kwargs) -> T:
        with block:
            return function(*args, **kwargs)

    return named


def count(name: str, value: int) -> None:
    """The value of a counter from now on."""
    if enabled():
        _domain().mark(message=name, payload=value)


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
