"""Bad input: an error that names the argument, and an engine that is as it was."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import graphattn
from graphattn import (
    ConfigError,
    EngineClosedError,
    FinishReason,
    QueueFullError,
    RequestError,
    SamplingParams,
    StepError,
    UnsupportedModelError,
)
from graphattn.models.contract import AttentionLayer
from tests.runtime.serving import make_engine
from tests.runtime.tiny_model import TinyModel

BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"max_batch": 0}, "max_batch: wanted an integer >= 1, got 0"),
    ({"max_batch": 2.0}, "max_batch: wanted an integer >= 1, got 2.0"),
    ({"max_batch": True}, "max_batch: wanted an integer >= 1, got True"),
    ({"max_seq_len": 0}, "max_seq_len: wanted an integer >= 1, got 0"),
    ({"max_seq_len": 97}, "max_seq_len: wanted at most the model's 96, got 97"),
    ({"max_seq_len": 90, "num_pages": 2}, "max_seq_len: wanted at most the 8 tokens"),
    ({"max_tokens": 3}, "max_tokens: wanted at least max_batch"),
    ({"max_tokens": "many"}, "max_tokens: wanted an integer"),
    ({"page_size": 3}, "page_size: wanted a power of two, got 3"),
    ({"page_size": 0}, "page_size: wanted an integer >= 1"),
    ({"num_pages": 0}, "num_pages: wanted an integer >= 1"),
    ({"num_pages": 4, "memory_budget": 4096}, "memory_budget: wanted nothing when num_pages"),
    ({"memory_budget": 10}, "memory_budget: wanted bytes for at least one page"),
    ({"buckets": []}, "buckets: wanted ascending row counts that end with max_batch = 4"),
    ({"buckets": [1, 2]}, "buckets: wanted ascending"),
    ({"buckets": [4, 2]}, "buckets: wanted ascending"),
    ({"backend": "gpu"}, "backend: wanted 'auto', 'cuda', 'host' or 'eager', got 'gpu'"),
    ({"backend": "cuda"}, "backend: wanted one that fits a model on cpu, got 'cuda'"),
    ({"run_ahead": 0}, "run_ahead: wanted an integer >= 1, at most 4"),
    ({"run_ahead": 5}, "run_ahead: wanted an integer >= 1, at most 4"),
    ({"max_queue": 0}, "max_queue: wanted an integer >= 1"),
    ({"prepack": 1}, "prepack: wanted True or False"),
    ({"progress": "yes"}, "progress: wanted True, False or a callable"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=[str(o) for o, _ in BAD_OPTIONS])
def test_a_bad_option_is_named_with_what_was_wanted(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        graphattn.capture(TinyModel(), **({"max_batch": 4, "page_size": 4} | options))


def test_an_unknown_option_fails() -> None:
    with pytest.raises(TypeError, match="max_bacth"):
        graphattn.capture(TinyModel(), max_batch=4, max_bacth=4)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (object(), "got object without attention_layers"),
        (torch.nn.Linear(2, 2), "got Linear without attention_layers"),
        (None, "got NoneType"),
    ],
)
def test_something_that_is_no_model_is_refused(model: object, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        graphattn.capture(model, max_batch=1)


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="model: wanted a model in eval mode"):
        graphattn.capture(TinyModel().train(), max_batch=1)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (AttentionLayer(5, 2, 8, scale=1.0), "layer 0: 5 query heads on 2 KV heads"),
        (AttentionLayer(17, 1, 8, scale=1.0), "17 query heads on 1 KV heads"),
        (AttentionLayer(2, 1, 257, scale=1.0), "layer 0: head size 257"),
    ],
)
def test_a_geometry_without_a_kernel_is_refused(layer: AttentionLayer, message: str) -> None:
    model = TinyModel()
    model.attention_layers = (layer,)
    with pytest.raises(UnsupportedModelError, match=message):
        graphattn.capture(model, max_batch=1)


def test_a_model_that_reads_the_device_is_refused_with_its_line() -> None:
    class Reading(TinyModel):
        def forward(self, step: Any) -> torch.Tensor:
            if step.positions.max() > 3:  # the host read
                return super().forward(step) + 1
            return super().forward(step)

    with pytest.raises(graphattn.CaptureError, match=r"test_engine_errors.py:\d+") as caught:
        graphattn.capture(Reading(), max_batch=1, page_size=4)
    assert "step.positions.max() > 3" in str(caught.value)


BAD_REQUESTS: list[tuple[Any, dict[str, Any], str]] = [
    ([], {}, "token_ids: wanted at least one token, got 'an empty prompt'"),
    ("hello", {}, "token_ids: wanted a sequence of token ids, got 'hello'"),
    (7, {}, "token_ids: wanted a sequence of token ids, got 7"),
    ([1] * 96, {}, "token_ids: wanted fewer than max_seq_len = 96 tokens"),
    ([1, 61], {}, "token_ids: wanted integers in 0..60, got 61"),
    ([1, -1], {}, "token_ids: wanted integers in 0..60, got -1"),
    ([1, 2.5], {}, "token_ids: wanted integers in 0..60, got 2.5"),
    ([[1, 2]], {}, "token_ids: wanted integers in 0..60, got [1, 2]"),
    ([1], {"max_new_tokens": 0}, "max_new_tokens: wanted an integer >= 1, got 0"),
    ([1], {"max_new_tokens": 1.5}, "max_new_tokens: wanted an integer >= 1, got 1.5"),
    ([1], {"stop_token_ids": [61]}, "stop_token_ids: wanted integers in 0..60, got 61"),
    ([1], {"stop_token_ids": "ab"}, "stop_token_ids: wanted token ids, got 'ab'"),
    ([1], {"stop_token_ids": list(range(9))}, "stop_token_ids: wanted at most 8 stop tokens"),
]


@pytest.fixture(scope="module")
def engine() -> Any:
    with make_engine(TinyModel()) as engine:
        yield engine


@pytest.mark.parametrize(
    ("prompt", "fields", "message"), BAD_REQUESTS, ids=[m for _, _, m in BAD_REQUESTS]
)
def test_a_bad_request_changes_nothing(
    engine: Any, prompt: Any, fields: dict[str, Any], message: str
) -> None:
    before = engine.stats()
    with pytest.raises(RequestError, match=re.escape(message)):
        engine.submit(prompt, **fields)
    with pytest.raises(RequestError, match=re.escape(message)):
        engine.generate([[1, 2], prompt], **fields)
    assert engine.stats() == before
    assert not engine.busy


def test_params_and_keywords_do_not_mix(engine: Any) -> None:
    with pytest.raises(ConfigError, match="params: wanted SamplingParams or keywords, not both"):
        engine.submit([1], SamplingParams(), max_new_tokens=3)
    with pytest.raises(ConfigError, match="params: wanted SamplingParams"):
        engine.submit([1], {"max_new_tokens": 3})
    with pytest.raises(TypeError, match="temprature"):
        engine.submit([1], temprature=1)


def test_a_request_of_another_engine_cannot_be_cancelled(engine: Any) -> None:
    with make_engine(TinyModel()) as other:
        foreign = other.submit([1], max_new_tokens=3)
        with pytest.raises(ConfigError, match="request: wanted a request of this engine"):
            engine.cancel(foreign)
        assert not foreign.finished


def test_the_queue_is_bounded_and_a_refused_request_can_be_submitted_later() -> None:
    with make_engine(TinyModel(), max_queue=2) as engine:
        kept = [engine.submit([i], max_new_tokens=2) for i in range(2)]
        before = engine.stats()
        with pytest.raises(QueueFullError, match="the queue holds 2 requests"):
            engine.submit([5])
        assert engine.stats() == before
        engine.step()
        kept.append(engine.submit([5], max_new_tokens=2))
        while engine.busy:
            engine.step()
        assert all(len(r.token_ids) == 2 for r in kept)


def test_a_closed_engine_says_so_and_its_requests_have_an_end() -> None:
    engine = make_engine(TinyModel(), max_batch=1)
    running, queued = (engine.submit([i], max_new_tokens=9) for i in (1, 2))
    engine.step()
    engine.close()
    engine.close()
    for request in (running, queued):
        assert request.finish_reason is FinishReason.CANCELLED
    ended = [e for e in engine.poll() if e.finished]
    assert {e.request for e in ended} == {running, queued}
    assert engine.poll() == []
    assert not engine.busy
    for call in (
        lambda: engine.submit([1]),
        engine.step,
        lambda: engine.generate([[1]]),
        lambda: engine.cancel(running),
        engine.audit,
    ):
        with pytest.raises(EngineClosedError, match="closed by its owner"):
            call()


def test_a_failing_step_ends_every_request_with_the_reason() -> None:
    engine = make_engine(TinyModel(), max_batch=1)
    running, queued = (engine.submit([i], max_new_tokens=9) for i in (1, 2))
    engine.step()
    for graph in engine._runner.graphs.values():
        graph.replay = lambda: 1 / 0
    with pytest.raises(StepError, match="ZeroDivisionError"):
        engine.step()
    for request in (running, queued):
        assert request.finish_reason is FinishReason.ERROR
        assert "ZeroDivisionError" in str(request.error)
    with pytest.raises(EngineClosedError, match="failed"):
        engine.submit([1])
    assert sum(e.finished for e in engine.poll()) == 2
