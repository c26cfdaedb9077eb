"""The engine under asyncio: one thread owns it, and coroutines talk to that thread.

    NEW --async with--> OPEN --aclose(), or the thread's death--> CLOSED

The thread sleeps in one of two places: on its commands while the engine is idle, on the oldest step
in flight while nothing can be launched. A new request or a landed step wakes it, never a clock.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Self, TypeVar, Unpack

from graphattn.engine import Engine
from graphattn.errors import EngineClosedError, StepError, wrong
from graphattn.request import (
    Completion,
    Event,
    FinishReason,
    Request,
    SamplingFields,
    SamplingParams,
    completion,
)

T = TypeVar("T")


class EventStream:
    """Events of one request, for one reader; made by `AsyncEngine.submit`.

    `async for event in stream` ends after the event that says `finished`. Leaving the loop early
    cancels the request, whether by `break`, an exception or a cancelled task; `async with stream`
    does so too, and waits for it. What a slow reader has not taken waits here and holds up nobody.
    """

    def __init__(self, cancel: Callable[[EventStream], object]) -> None:
        self._cancel = cancel
        self._request: Request | None = None  # set by the engine's thread
        self._events: deque[Event] = deque()
        self._news = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def request(self) -> Request:
        """The request. Its tokens run ahead of the events until it has finished."""
        assert self._request is not None, "submit returns streams that have one"
        return self._request

    def cancel(self) -> None:
        """Ask the engine to end the request; returns at once. Harmless when it has ended."""
        if not self._ended.is_set():
            self._cancel(self)

    async def aclose(self) -> None:
        """End the request; when this returns the engine has taken its slot and pages back."""
        self.cancel()
        await self._ended.wait()

    async def __aiter__(self) -> AsyncIterator[Event]:
        try:
            while True:
                await self._news.wait()
                while self._events:
                    yield self._events.popleft()
                if self._ended.is_set():
                    return
                self._news.clear()
        finally:
            self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Close it."""
        await self.aclose()

    def _put(self, event: Event) -> None:
        self._events.append(event)
        if event.finished:
            self._ended.set()
        self._news.set()


class AsyncEngine:
    """An engine for the coroutines of one event loop: `async with AsyncEngine(engine) as serving`.

    The engine is lent: inside the block only its own thread touches it, afterwards it is the
    caller's again, who also closes it. Leaving the block takes no further requests and waits for
    those that run; leaving it by an exception cancels them.

    A step that fails closes the engine and ends every stream with an event that says so
    (`FinishReason.ERROR`). The methods are for coroutines of the loop that entered the block.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._owner: _Owner | None = None

    async def submit(
        self,
        token_ids: Sequence[int],
        params: SamplingParams | None = None,
        **fields: Unpack[SamplingFields],
    ) -> EventStream:
        """Queue a request; its fields can be given as `SamplingParams` or as keywords.

        Raises what `Engine.submit` does: `RequestError`, `QueueFullError`, `EngineClosedError`,
        the last also once `aclose` was called. After an error nothing has changed.
        """
        owner = self._opened()
        stream = EventStream(lambda stream: owner.send(lambda: owner.cancel(stream)))
        try:
            await owner.ask(lambda: owner.submit(stream, token_ids, params, fields))
        except asyncio.CancelledError:
            stream.cancel()
            raise
        return stream

    async def generate(
        self,
        token_ids: Sequence[int],
        params: SamplingParams | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Completion:
        """Serve one request to its end; cancelling the task cancels it. Raises as `submit` does."""
        async with await self.submit(token_ids, params, **fields) as stream:
            async for _ in stream:
                pass
        return completion(stream.request)

    async def call(self, work: Callable[[Engine], T]) -> T:
        """`work(engine)`, run on the engine's thread between two steps: its result or exception.

        For everything else an engine can do: `await serving.call(Engine.stats)`. Raises
        `EngineClosedError` outside of the block.
        """
        return await self._opened().ask(lambda: work(self._engine))

    async def aclose(self, *, drain: bool = True) -> None:
        """Take no further requests and end the thread. Idempotent.

        Waits for the requests that run; `drain=False`, or cancelling this call, cancels them.
        Raises what the thread died of, if it did.
        """
        if self._owner is not None:
            await self._owner.end(drain=drain)

    async def __aenter__(self) -> Self:
        """Start the thread. Raises `ConfigError` for an engine that has requests, or used twice."""
        if self._owner is not None:
            raise wrong("AsyncEngine", "to be entered once", "a second time", "Make another.")
        if self._engine.busy:
            raise wrong("engine", "an idle engine", "one with requests", "Finish them first.")
        self._owner = _Owner(self._engine, asyncio.get_running_loop())
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        """Drain, or cancel everything after an exception."""
        await self.aclose(drain=error is None)

    def _opened(self) -> _Owner:
        if self._owner is None:
            raise EngineClosedError("AsyncEngine is not open; use `async with AsyncEngine(engine)`")
        return self._owner


class _Owner:
    """The thread and what only it may touch; `send`, `ask` and `end` are the loop's side."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._streams: dict[Request, EventStream] = {}  # of requests that have not ended
        self._closing = False
        self._commands: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._may_send = threading.Lock()
        self._gone = False  # guarded by the lock, so that no command is left unanswered
        self._end: Future[None] = Future()
        self._end.set_running_or_notify_cancel()  # from here on nobody who waits can cancel it
        # The step of a group with a dead rank never lands: the engine must look at the time.
        self._patience = math.inf if (dcp := engine.config.dcp) is None else dcp.timeout
        self._thread = threading.Thread(target=self._main, name="graphattn", daemon=True)
        self._thread.start()

    def send(self, command: Callable[[], object]) -> bool:
        """Have the thread run `command`, which must not raise; False when it has ended."""
        with self._may_send:
            if not self._gone:
                self._commands.put(command)
            return not self._gone

    async def ask(self, work: Callable[[], T]) -> T:
        """What the thread answers to `work`."""
        answer: Future[T] = Future()
        if not self.send(lambda: _answer(answer, work)):
            raise EngineClosedError("AsyncEngine was closed; make another")
        return await asyncio.wrap_future(answer)

    async def end(self, *, drain: bool) -> None:
        """Have it end, and wait for that."""
        self.send(lambda: self._close(drain=drain))
        try:
            await asyncio.wrap_future(self._end)
        except asyncio.CancelledError:
            self.send(lambda: self._close(drain=False))
            raise
        finally:
            if self._end.done():
                self._thread.join()  # it has nothing left to do

    def submit(
        self,
        stream: EventStream,
        token_ids: Sequence[int],
        params: SamplingParams | None,
        fields: SamplingFields,
    ) -> None:
        """On the thread: queue a request whose events go to `stream`."""
        if self._closing:
            raise EngineClosedError("AsyncEngine is being closed; make another")
        stream._request = self._engine.submit(token_ids, params, **fields)
        self._streams[stream._request] = stream

    def cancel(self, stream: EventStream) -> None:
        """On the thread: end the request of `stream`, if it was taken and runs."""
        if stream._request is not None and not stream._request.finished:
            self._engine.cancel(stream._request)

    def _close(self, *, drain: bool) -> None:
        self._closing = True
        for stream in () if drain else self._streams.values():
            self.cancel(stream)

    def _main(self) -> None:
        failure = None
        try:
            while self._streams or not self._closing:
                self._turn()
        except BaseException as error:
            failure = error
            with suppress(Exception):  # the first error is the one to tell
                self._fail(f"the engine's thread died: {type(error).__name__}: {error}")
        with self._may_send:
            self._gone = True
        while not self._commands.empty():
            self._commands.get()()
        self._end.set_exception(failure) if failure else self._end.set_result(None)

    def _turn(self) -> None:
        """Obey, launch at most one step, hand out what has landed; sleeps when there is no more."""
        idle = not self._engine.busy
        for _ in range(max(idle, self._commands.qsize())):
            self._commands.get()()
        waits = False
        if self._engine.busy:
            with suppress(StepError):  # it has closed the engine, whose events say why
                waits = not self._engine.step()
        self._hand_out(self._engine.poll(self._patience if waits else 0.0))

    def _hand_out(self, events: Sequence[Event]) -> None:
        news = [(self._streams[e.request], e) for e in events if e.request in self._streams]
        for event in events:
            if event.finished:
                self._streams.pop(event.request, None)
        if news:
            self._loop.call_soon_threadsafe(_deliver, news)

    def _fail(self, reason: str) -> None:
        self._closing = True
        try:
            self._engine.close()
        finally:
            finish, requests = FinishReason.ERROR, list(self._streams)
            for request in requests:
                request.finish_reason, request.error = finish, reason
            self._hand_out([Event(r, (), (), True, finish, reason) for r in requests])


def _answer(answer: Future[T], work: Callable[[], T]) -> None:
    if not answer.set_running_or_notify_cancel():
        return
    try:
        answer.set_result(work())
    except Exception as error:
        answer.set_exception(error)


def _deliver(news: Sequence[tuple[EventStream, Event]]) -> None:
    for stream, event in news:
        stream._put(event)
