"""NVTX ranges of the domain "graphattn", free when no tool listens.

Ranges that are open while a graph is captured are projected onto its nodes by the profiler;
ranges around a replay are host ranges. Whether a tool listens is decided when the first range is
made, as NVTX does itself.

    with scope("attend.3"): ...            # attributes are built once per name

    name = prepared("replay.decode8")      # for hot loops: no context manager
    push(name); ...; pop()
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import TracebackType
from typing import Any

import nvtx

DOMAIN = "graphattn"


@cache
def _domain() -> Any:
    return nvtx.get_domain(DOMAIN)


@cache
def enabled() -> bool:
    """Whether a tool listens to the ranges."""
    return type(_domain()).__name__ != "DummyDomain"


@cache
def prepared(name: str) -> Any:
    """Event attributes of a range, built once per name; what `push` takes."""
    return _domain().get_event_attributes(message=name)


def push(attributes: Any) -> None:
    """Open a range. Ranges of a thread nest; close each with `pop`."""
    _domain().push_range(attributes)


def pop() -> None:
    """Close the range that was opened last in this thread."""
    _domain().pop_range()


@cache
def scope(name: str) -> AbstractContextManager[None]:
    """A range around a `with` block. The same object serves every use of the name."""
    return _Scope(prepared(name)) if enabled() else nullcontext()


class _Scope(AbstractContextManager[None]):
    def __init__(self, attributes: Any) -> None:
        self._attributes = attributes
        self._domain = _domain()

    def __enter__(self) -> None:
        self._domain.push_range(self._attributes)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._domain.pop_range()
