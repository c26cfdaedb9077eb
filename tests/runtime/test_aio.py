"""The engine under asyncio: the same tokens, streams that can be left, a thread that sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from graphattn import AsyncEngine, EventStream, FinishReason
from graphattn.engine import Engine
from tests.runtime.async_serving import BOUND, Gate, collect, run
from tests.runtime.lagging_stream import LaggingStream
from tests.runtime.serving import make_engine, prompts
from tests.runtime.tiny_model import TinyModel


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel()


@pytest.mark.parametrize("run_ahead", [1, 2, 3])
def test_thirty_streams_at_once(model: TinyModel, run_ahead: int) -> None:
    texts = prompts(30, seed=run_ahead, longest=20)
    counts = [1 + 7 * i % 19 for i in range(30)]

    async def body(serving: AsyncEngine) -> None:
        async def one(text: list[int], count: int) -> list[int]:
            return await collect(await serving.submit(text, max_new_tokens=count))

        tokens = await asyncio.gather(*map(one, texts, counts))
        assert tokens == [model.generate(t, n) for t, n in zip(texts, counts, strict=True)]

    run(make_engine(model, stream=LaggingStream(pace=2), run_ahead=run_ahead), body)


def test_generate_is_the_engines(model: TinyModel) -> None:
    engine = make_engine(model)
    (expected,) = engine.generate([[3, 1, 4]], max_new_tokens=9, temperature=0.8, seed=5)

    async def body(serving: AsyncEngine) -> None:
        fields: dict[str, Any] = {"max_new_tokens": 9, "temperature": 0.8, "seed": 5}
        assert await serving.generate([3, 1, 4], **fields) == expected
        assert (await serving.call(Engine.stats)).requests_finished == 2

    run(engine, body)


async def by_break(stream: EventStream) -> None:
    async for _ in stream:
        break


async def by_closing(stream: EventStream) -> None:
    await anext(aiter(stream))
    await stream.aclose()


async def by_exception(stream: EventStream) -> None:
    async def read() -> None:
        async for event in stream:
            raise KeyError(event)

    with pytest.raises(KeyError):
        await read()


async def by_cancelling_the_task(stream: EventStream) -> None:
    started = asyncio.Event()

    async def read() -> None:
        async for _ in stream:
            started.set()

    task = asyncio.create_task(read())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_leaving_the_block(stream: EventStream) -> None:
    async with stream:
        await anext(aiter(stream))
    assert stream.request.finished


@pytest.mark.parametrize(
    "leave", [by_break, by_closing, by_exception, by_cancelling_the_task, by_leaving_the_block]
)
def test_leaving_a_stream_cancels_its_request(
    model: TinyModel, leave: Callable[[EventStream], Coroutine[Any, Any, None]]
) -> None:
    async def body(serving: AsyncEngine) -> None:
        left = await serving.submit([1, 2, 3], max_new_tokens=90)
        other = await serving.submit([4, 5], max_new_tokens=30)
        await leave(left)
        assert await collect(other) == model.generate([4, 5], 30)
        await left.aclose()
        assert left.request.finish_reason is FinishReason.CANCELLED
        assert len(left.request.token_ids) < 90
        rest = [event async for event in left]
        assert rest[-1].finish_reason is FinishReason.CANCELLED

    run(make_engine(model, stream=LaggingStream(pace=1)), body)


def test_a_cancelled_submit_leaves_no_request(model: TinyModel) -> None:
    """Whether the engine's thread has taken the command by then or not."""

    async def body(serving: AsyncEngine) -> None:
        for pauses in range(12):
            task = asyncio.create_task(serving.submit([1, 2, 3], max_new_tokens=90))
            for _ in range(pauses):
                await asyncio.sleep(0)
            if not task.cancel():
                await (await task).aclose()
            await asyncio.wait([task])
        task = asyncio.create_task(serving.generate([1, 2, 3], max_new_tokens=90))
        while not (await serving.call(Engine.stats)).tokens_emitted:
            pass
        task.cancel()
        await asyncio.wait([task])
        stats = await serving.call(Engine.stats)
        assert (stats.running, stats.waiting) == (0, 0)

    run(make_engine(model), body)


def test_a_slow_reader_holds_up_nobody(model: TinyModel) -> None:
    async def body(serving: AsyncEngine) -> None:
        slow = await serving.submit([7, 8], max_new_tokens=40)
        for i in range(5):
            done = await serving.generate([i], max_new_tokens=12)
            assert list(done.token_ids) == model.generate([i], 12)
        assert await collect(slow) == model.generate([7, 8], 40)

    run(make_engine(model), body)


def count_calls(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    calls = {"step": 0, "poll": 0}

    def counted(name: str) -> Callable[..., Any]:
        method = getattr(engine, name)

        def call(*args: Any) -> Any:
            calls[name] += 1
            return method(*args)

        return call

    for name in calls:
        monkeypatch.setattr(engine, name, counted(name))
    return calls


def test_the_thread_sleeps_until_a_step_lands(
    model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps are launched, a third finds no room, and then there is silence."""
    gate = Gate()
    engine = make_engine(model, stream=gate, run_ahead=2)
    calls = count_calls(engine, monkeypatch)

    async def body(serving: AsyncEngine) -> None:
        stream = await serving.submit([1, 2, 3], max_new_tokens=6)
        await asyncio.to_thread(gate.waited.wait, BOUND)
        assert calls["step"] == 3
        for _ in range(500):
            await asyncio.sleep(0)
        assert calls == {"step": 3, "poll": 3}
        gate.opened.set()
        assert await collect(stream) == model.generate([1, 2, 3], 6)

    run(engine, body)


def test_an_idle_engine_is_left_alone(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(model)
    calls = count_calls(engine, monkeypatch)

    async def body(serving: AsyncEngine) -> None:
        await serving.generate([1, 2], max_new_tokens=2)
        stats = await serving.call(Engine.stats)
        before = dict(calls)
        assert calls["step"] <= 2 * stats.steps + 2
        for _ in range(500):
            await asyncio.sleep(0)
        assert calls["step"] == before["step"]
        assert calls["poll"] <= before["poll"] + 1  # of the turn that answered `call`

    run(engine, body)
