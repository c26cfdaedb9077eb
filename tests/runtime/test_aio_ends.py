"""Ends under asyncio: refusals, failing steps, closing; each is definite and nothing hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from graphattn import (
    AsyncEngine,
    EngineClosedError,
    EventStream,
    FinishReason,
    QueueFullError,
    RequestError,
)
from graphattn.engine import Engine
from graphattn.errors import ConfigError
from tests.runtime.async_serving import BOUND, Gate, collect, run
from tests.runtime.lagging_stream import LaggingStream
from tests.runtime.serving import make_engine, prompts
from tests.runtime.tiny_model import TinyModel


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel()


def test_errors_of_submit_reach_the_task(model: TinyModel) -> None:
    gate = Gate()

    async def body(serving: AsyncEngine) -> None:
        with pytest.raises(RequestError, match="token_ids"):
            await serving.submit([])
        with pytest.raises(RequestError, match="temperature"):
            await serving.generate([1], temperature=-1.0)
        with pytest.raises(TypeError, match="max_tokens"):
            await serving.submit([1], max_tokens=3)  # type: ignore[call-arg]
        first = await serving.submit([1], max_new_tokens=2)
        await asyncio.to_thread(gate.waited.wait, BOUND)  # it has its slot
        tasks = [asyncio.create_task(serving.submit([2], max_new_tokens=2)) for _ in range(5)]
        await asyncio.sleep(0)  # all are sent before the thread wakes
        gate.opened.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        taken = [o for o in outcomes if isinstance(o, EventStream)]
        refused = [o for o in outcomes if isinstance(o, QueueFullError)]
        assert len(taken) + len(refused) == 5
        assert (len(taken), len(refused)) == (3, 2)
        for stream in (first, *taken):
            assert len(await collect(stream)) == 2
        assert len(await collect(await serving.submit([3], max_new_tokens=2))) == 2

    run(make_engine(model, stream=gate, max_batch=1, max_queue=3, run_ahead=1), body)


def test_a_failing_step_ends_every_stream(
    model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model, max_batch=2)
    submit, work = engine._runner.stream.submit, []

    def fail_at_the_fifth(launch: Callable[[], object]) -> None:
        work.append(launch)
        if len(work) == 5:
            raise MemoryError("injected")
        submit(launch)

    monkeypatch.setattr(engine._runner.stream, "submit", fail_at_the_fifth)

    async def body(serving: AsyncEngine) -> None:
        streams = [await serving.submit([i], max_new_tokens=90) for i in range(4)]
        for stream in streams:
            *_, last = [event async for event in stream]
            assert last.finish_reason is FinishReason.ERROR
            assert "injected" in str(last.error)
        with pytest.raises(EngineClosedError, match="injected"):
            await serving.submit([1])
        assert (await serving.call(Engine.stats)).requests_finished == 4

    run(engine, body)


def test_a_thread_that_dies_says_so(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug of ours must not leave anybody waiting."""
    engine = make_engine(model)
    poll = engine.poll

    def broken(timeout: float) -> Any:
        if engine.stats().steps > 3:
            raise LookupError("injected")
        return poll(timeout)

    monkeypatch.setattr(engine, "poll", broken)

    async def main() -> None:
        async with asyncio.timeout(BOUND):
            serving = await AsyncEngine(engine).__aenter__()
            stream = await serving.submit([1, 2], max_new_tokens=90)
            done = await serving.generate([3], max_new_tokens=90)
            assert (done.finish_reason, done.error) == (FinishReason.ERROR, stream.request.error)
            assert "LookupError: injected" in str(done.error)
            *_, last = [event async for event in stream]
            assert last.error == done.error
            with pytest.raises(EngineClosedError):
                await serving.submit([1])
            with pytest.raises(LookupError, match="injected"):
                await serving.aclose()

    asyncio.run(main())
    with pytest.raises(EngineClosedError):
        engine.step()


def test_leaving_the_block_drains(model: TinyModel) -> None:
    texts = prompts(9, seed=6, longest=9)
    with make_engine(model) as engine:

        async def main() -> list[list[int]]:
            async with asyncio.timeout(BOUND):
                async with AsyncEngine(engine) as serving:
                    streams = [await serving.submit(t, max_new_tokens=15) for t in texts]
                with pytest.raises(EngineClosedError, match="was closed"):
                    await serving.submit([1])
                await serving.aclose()
                return [await collect(stream) for stream in streams]

        assert asyncio.run(main()) == [model.generate(t, 15) for t in texts]
        (again,) = engine.generate([texts[0]], max_new_tokens=15)  # the engine is ours again
        assert list(again.token_ids) == model.generate(texts[0], 15)


def test_nothing_new_is_taken_while_the_rest_drains(model: TinyModel) -> None:
    gate = Gate()

    async def body(serving: AsyncEngine) -> None:
        stream = await serving.submit([1, 2], max_new_tokens=5)
        closing = asyncio.create_task(serving.aclose())
        await asyncio.sleep(0)
        late = asyncio.create_task(serving.submit([3]))
        await asyncio.sleep(0)
        gate.opened.set()
        with pytest.raises(EngineClosedError):
            await late
        await closing
        assert await collect(stream) == model.generate([1, 2], 5)

    run(make_engine(model, stream=gate), body)


@pytest.mark.parametrize("how", ["exception", "no drain", "cancelled close"])
def test_closing_with_steps_in_flight(model: TinyModel, how: str) -> None:
    engine = make_engine(model, stream=LaggingStream(pace=1), run_ahead=3)

    async def main() -> None:
        serving = AsyncEngine(engine)
        try:
            async with asyncio.timeout(BOUND), serving:
                streams = [await serving.submit([i], max_new_tokens=90) for i in range(7)]
                async for _ in streams[0]:
                    if how == "exception":
                        raise KeyError(how)
                    if how == "no drain":
                        await serving.aclose(drain=False)
                    else:
                        closing = asyncio.create_task(serving.aclose())
                        await asyncio.sleep(0)
                        closing.cancel()
        except KeyError:
            pass
        for stream in streams[1:]:
            assert stream.request.finish_reason is FinishReason.CANCELLED
            *_, last = [event async for event in stream]
            assert last.finish_reason is FinishReason.CANCELLED

    with engine:
        asyncio.run(main())
        assert engine.stats().requests_finished == 7
        (done,) = engine.generate([[5, 6]], max_new_tokens=8)
        assert list(done.token_ids) == model.generate([5, 6], 8)


def test_what_cannot_be_entered(model: TinyModel) -> None:
    async def main() -> None:
        serving = AsyncEngine(engine)
        await serving.aclose()  # of what was never opened
        with pytest.raises(EngineClosedError, match="is not open"):
            await serving.submit([1])
        async with serving:
            pass
        with pytest.raises(ConfigError, match="entered once"):
            await serving.__aenter__()
        engine.submit([1, 2])
        with pytest.raises(ConfigError, match="an idle engine"):
            await AsyncEngine(engine).__aenter__()

    with make_engine(model) as engine:
        asyncio.run(main())
