"""Signals, memory that runs out, and closing in flight: every request gets a definite end."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import graphattn
from graphattn import CaptureError, EngineClosedError, FinishReason, NGram, StepError
from graphattn.engine import Engine
from tests.runtime.lagging_stream import LaggingStream
from tests.runtime.serving import make_engine
from tests.runtime.tiny_model import TinyModel

RUNTIME = str(Path(graphattn.__file__).parent)
HOST = {"engine.py", "scheduler.py", "pages.py", "prefix.py", "seat.py", "outbox.py", "runner.py"}


@contextmanager
def interrupted(at: int) -> Iterator[list[str]]:
    """SIGINT arrives before line number `at` of the host code that runs in the block.

    Yields the lines that were passed; a signal's handler runs between two of them.
    """
    passed: list[str] = []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not (name.startswith(RUNTIME) and Path(name).name in HOST):
            return None
        if event == "line":
            passed.append(f"{Path(name).name}:{frame.f_lineno}")
            if len(passed) == at:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield passed
    finally:
        sys.settrace(before)


def loaded(model: TinyModel) -> tuple[Engine, list[graphattn.Request]]:
    """Two slots, pages that run out, requests in a slot, in flight and in the queue."""
    engine = make_engine(
        model,
        max_batch=2,
        max_seq_len=24,
        page_size=2,
        num_pages=14,
        speculate=NGram(1),
        backend="eager",
        stream=LaggingStream(pace=3),
    )
    requests = [engine.submit([i + 1] * 5, max_new_tokens=12) for i in range(4)]
    for _ in range(7):
        engine.step()
    return engine, requests


def one_turn(engine: Engine, requests: list[graphattn.Request], seen: list[Any]) -> None:
    """What a loop does between two looks at its clients."""
    engine.step()
    engine.cancel(requests[1])
    seen += engine.poll()


def break_off(model: TinyModel, at: int) -> tuple[bool, str]:
    """A signal at line `at` of a turn; whether the engine was closed by it, and where it was."""
    engine, requests = loaded(model)
    seen: list[Any] = []
    with pytest.raises(KeyboardInterrupt), interrupted(at) as lines:
        one_turn(engine, requests, seen)
    closed = engine._closed is not None
    while engine.busy:
        engine.step()
        seen += engine.poll()
    seen += engine.poll()
    for request in requests:
        assert request.finished, lines[-1]
        assert sum(e.finished for e in seen if e.request is request) <= 1, lines[-1]
        if request.finish_reason is FinishReason.ERROR:
            assert "KeyboardInterrupt" in str(request.error)
        else:
            assert request is requests[1] or len(request.token_ids) == 12
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0), lines[-1]
    engine.close()
    return closed, lines[-1]


def passed_lines(model: TinyModel) -> list[str]:
    engine, requests = loaded(model)
    with interrupted(at=-1) as lines:
        one_turn(engine, requests, [])
    engine.close()
    return lines


@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_a_signal_anywhere_in_the_loop_leaves_no_request_without_an_end(stride: int) -> None:
    model = TinyModel()
    lines = passed_lines(model)
    places = [i + 1 for i, line in enumerate(lines) if line not in lines[:i]]
    ends = [break_off(model, at)[0] for at in places[::stride]]
    assert {True, False} == set(ends)  # between two calls nothing is half done


class OutOfMemory(TinyModel):
    """Its `fatal`-th run raises what a device without memory raises."""

    fatal = 0

    def __call__(self, step: Any) -> torch.Tensor:
        self.fatal -= 1
        if not self.fatal:
            raise torch.OutOfMemoryError("injected: tried to allocate 2.00 GiB")
        return super().__call__(step)


@pytest.mark.parametrize("fatal", [1, 2, 4])
def test_out_of_memory_at_capture_names_the_bucket_and_leaves_nothing_behind(fatal: int) -> None:
    model = OutOfMemory()
    model.fatal = fatal
    with pytest.raises(CaptureError, match=r"program '.*': .*tried to allocate"):
        make_engine(model)
    assert gc.isenabled()
    with make_engine(model) as engine:  # and there is memory again
        (done,) = engine.generate([[1, 2, 3]], max_new_tokens=6)
    assert list(done.token_ids) == model.generate([1, 2, 3], 6)


@pytest.mark.parametrize("run_ahead", [1, 3])
def test_closing_in_flight_ends_every_request_as_cancelled(run_ahead: int) -> None:
    model, stream = TinyModel(), LaggingStream(pace=0)
    engine = make_engine(model, max_batch=2, run_ahead=run_ahead, stream=stream)
    requests = [engine.submit([i + 1] * 3, max_new_tokens=9) for i in range(4)]
    while engine.step():
        pass
    assert engine.stats().in_flight == run_ahead
    engine.close()
    assert stream.pending == 0  # nothing runs on into memory that is gone
    events = engine.poll()
    assert [e.request for e in events if e.finished] == requests
    for request in requests:
        assert request.finish_reason is FinishReason.CANCELLED
        assert "closed by its owner" in str(request.error)
    with pytest.raises(EngineClosedError, match="closed by its owner"):
        engine.step()


def test_an_error_while_results_are_read_is_told_like_a_failed_step() -> None:
    engine = make_engine(TinyModel())
    request = engine.submit([1, 2], max_new_tokens=4)
    engine.step()

    def fails() -> Any:
        raise RuntimeError("injected: an illegal memory access was encountered")

    engine._outputs.landed = fails  # type: ignore[method-assign]
    with pytest.raises(StepError, match="reading what has landed failed: RuntimeError"):
        engine.poll()
    assert request.finish_reason is FinishReason.ERROR
    assert "illegal memory access" in str(request.error)
    with pytest.raises(EngineClosedError):
        engine.step()
