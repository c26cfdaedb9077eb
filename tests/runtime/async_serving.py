"""For tests of the asyncio side: a bounded run, a checked reader, steps that land on demand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from graphattn import AsyncEngine, EventStream
from graphattn.engine import Engine
from graphattn.stream import HostStream

BOUND = 60.0  # seconds after which a test that hangs fails


def run(engine: Engine, body: Callable[[AsyncEngine], Coroutine[Any, Any, None]]) -> None:
    """`body` inside of `async with AsyncEngine`; afterwards the engine is idle and clean."""

    async def main() -> None:
        async with asyncio.timeout(BOUND), AsyncEngine(engine) as serving:
            await body(serving)

    with engine:
        asyncio.run(main())
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.pages_taken) == (0, 0, 0)
        assert stats.requests_finished == stats.requests_submitted
        assert "graphattn" not in {thread.name for thread in threading.enumerate()}


async def collect(stream: EventStream) -> list[int]:
    """Its tokens, and that its events agree with its request."""
    events = [event async for event in stream]
    tokens = [token for event in events for token in event.token_ids]
    assert [event.finished for event in events] == [False] * (len(events) - 1) + [True]
    assert tokens == stream.request.token_ids
    assert events[-1].finish_reason is stream.request.finish_reason
    return tokens


class Gate(HostStream):
    """Steps land when the test says so."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.waited = threading.Event()

    def mark(self) -> Gate:
        return self

    def done(self) -> bool:
        return self.opened.is_set()

    def wait(self) -> None:
        self.waited.set()
        assert self.opened.wait(BOUND)
