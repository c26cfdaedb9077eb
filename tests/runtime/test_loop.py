"""The serving loop: preemption, prefixes, windows, plans of others, and callers that stay away."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from graphattn import (
    DCP,
    MTP,
    DraftModel,
    FinishReason,
    NGram,
    Request,
    SamplingParams,
    VirtualGroup,
)
from graphattn.engine import Engine
from graphattn.errors import ConfigError, QueueFullError
from graphattn.plan import Plan
from tests.runtime.lagging_stream import LaggingStream
from tests.runtime.serving import make_engine, prompts
from tests.runtime.tiny_model import TinyModel
from tests.runtime.tiny_mtp import KnowingMTP, TinyTarget

FIELDS: dict[str, Any] = {
    "temperature": 0.9,
    "top_p": 0.95,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.6,
}


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel(windows=(5, 0))


@pytest.fixture(scope="module")
def small() -> TinyModel:
    return TinyModel(num_q_heads=4, head_dim=4, windows=(3,), seed=5)


def params(i: int) -> SamplingParams:
    """Greedy and sampled with penalties in turn: what was emitted before a preemption counts."""
    return SamplingParams(4 + 5 * i % 23, seed=i, **(FIELDS if i % 2 else {}))


def alone(model: TinyModel, texts: list[list[int]]) -> list[list[int]]:
    """Each request by itself, nothing shared, nothing preempted."""
    with make_engine(model, prefix_reuse=False) as engine:
        return [list(engine.generate([t], params(i))[0].token_ids) for i, t in enumerate(texts)]


def load(
    engine: Engine, texts: list[list[int]], *, seed: int = 0, cancel: float = 0.0
) -> list[Request]:
    """Requests that arrive over time, some of which are cancelled; to the end."""
    rng, waiting, requests = random.Random(seed), list(enumerate(texts)), []
    while waiting or engine.busy:
        while waiting and rng.random() < 0.4:
            i, text = waiting.pop(0)
            requests.append(engine.submit(text, params(i)))
        engine.step()
        if requests and rng.random() < cancel:
            engine.cancel(rng.choice(requests))
        engine.poll()
    return requests


def check(engine: Engine, requests: list[Request], expected: list[list[int]]) -> None:
    for request, tokens in zip(requests, expected, strict=True):
        if request.finish_reason is FinishReason.CANCELLED:
            assert request.token_ids == tokens[: len(request.token_ids)]
        else:
            assert request.token_ids == tokens
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.pages_taken) == (0, 0, 0)
    assert stats.pages_free + stats.pages_cached == engine.config.bounds.num_pages
    assert stats.tokens_emitted == sum(len(r.token_ids) for r in requests)
    assert stats.requests_finished == stats.requests_submitted == len(requests)


@pytest.mark.parametrize(
    ("run_ahead", "pace", "drafter"),
    [(1, 9, "none"), (2, 2, "none"), (3, 1, "none"), (2, 2, "ngram"), (3, 2, "model")],
)
def test_tokens_under_load_and_preemption(
    model: TinyModel, small: TinyModel, run_ahead: int, pace: int, drafter: str
) -> None:
    """A pool for less than half of what runs: requests leave and come back, their tokens stay."""
    texts = prompts(24, seed=31, longest=30)
    speculate = {"none": None, "ngram": NGram(3), "model": DraftModel(small, 2)}[drafter]
    with make_engine(
        model,
        stream=LaggingStream(pace=pace),
        run_ahead=run_ahead,
        speculate=speculate,
        max_tokens=20,
        max_seq_len=60,
        num_pages=17,
    ) as engine:
        requests = load(engine, texts, seed=run_ahead, cancel=0.05)
        check(engine, requests, alone(model, texts))
        assert engine.stats().preemptions > 0
        assert sum(r.preemptions for r in requests) == engine.stats().preemptions


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["none", "ngram", "model"])
@pytest.mark.parametrize("run_ahead", [1, 2, 3])
def test_two_hundred_requests(
    model: TinyModel, small: TinyModel, run_ahead: int, drafter: str
) -> None:
    texts = prompts(200, seed=run_ahead, longest=60)
    speculate = {"none": None, "ngram": NGram(4), "model": DraftModel(small, 3)}[drafter]
    options = {"max_batch": 8, "max_tokens": 48, "num_pages": 32, "speculate": speculate}
    with make_engine(model, stream=LaggingStream(pace=3), run_ahead=run_ahead, **options) as engine:
        check(engine, load(engine, texts, cancel=0.03), alone(model, texts))
        assert engine.stats().preemptions > 0


def test_the_first_request_is_never_preempted(model: TinyModel) -> None:
    texts = prompts(9, seed=3, longest=40)
    with make_engine(model, num_pages=24) as engine:
        requests = [engine.submit(t, max_new_tokens=50) for t in texts]
        while engine.busy:
            engine.step()
        assert engine.stats().preemptions > 0
        assert requests[0].preemptions == 0


@pytest.mark.parametrize(
    ("W", "I", "drafter"),
    [(1, 1, "none"), (1, 1, "model"), (2, 1, "none"), (2, 3, "model"), (4, 1, "ngram")],
)
def test_equal_prefixes_are_computed_once(
    model: TinyModel, small: TinyModel, W: int, I: int, drafter: str
) -> None:
    rng = random.Random(4)
    common = [rng.randrange(61) for _ in range(50)]
    texts = [[*common[:n], i, i + 1] for i, n in enumerate((50, 50, 48, 30, 50, 17, 3))]
    speculate = {"none": None, "ngram": NGram(3), "model": DraftModel(small, 2)}[drafter]
    dcp = DCP(VirtualGroup(W), I) if W > 1 else None
    with make_engine(model, dcp=dcp, speculate=speculate, max_tokens=24) as engine:
        requests = load(engine, texts)
        check(engine, requests, alone(model, texts))
        first = engine.stats().prompt_tokens_reused
        assert first > 0
        again = load(engine, texts, seed=9)
        assert [r.token_ids for r in again] == [r.token_ids for r in requests]
        assert engine.stats().prompt_tokens_reused > 2 * first


@pytest.mark.parametrize(("W", "I"), [(1, 1), (2, 3)])
@pytest.mark.parametrize("depth", [1, 2])
def test_modules_that_predict_see_the_prefix_too(W: int, I: int, depth: int) -> None:
    """A module that is always right stays so after a hit: its KV of the prefix was there, the last
    entry of it for the same next token. A chain keeps more than KV, and shares nothing."""
    target, rng = TinyTarget(), random.Random(4)
    common = [rng.randrange(61) for _ in range(48)]
    texts = [[*common, i] for i in range(4)] + [[*common[:24], 7, *common[25:40]]]
    dcp = DCP(VirtualGroup(W), I) if W > 1 else None
    speculate = MTP(2, KnowingMTP(target, depth))
    with make_engine(target, dcp=dcp, speculate=speculate, max_tokens=24) as engine:
        done = [engine.generate([text], max_new_tokens=9)[0] for text in texts]
        stats = engine.stats()
    assert [list(c.token_ids) for c in done] == [target.generate(t, 9) for t in texts]
    assert (stats.prompt_tokens_reused > 0) == (depth == 1)
    assert stats.tokens_drafted == stats.tokens_accepted > 0


def test_a_conversation_goes_on_from_what_was_emitted(model: TinyModel) -> None:
    """Emitted tokens are found too, up to the last one, whose KV is not written."""
    with make_engine(model, page_size=4) as engine:
        (turn,) = engine.generate([[1, 2, 3]], max_new_tokens=14)
        text = [1, 2, 3, *turn.token_ids]
        reused = engine.stats().prompt_tokens_reused
        (more,) = engine.generate([[*text, 7]], max_new_tokens=5)
        assert engine.stats().prompt_tokens_reused - reused == 16
    assert list(more.token_ids) == model.generate([*text, 7], 5)


def test_what_is_cached_gives_way(model: TinyModel) -> None:
    """Kept prefixes never make a request wait."""
    texts = [[i] * 20 for i in range(12)]
    with make_engine(model, num_pages=24) as engine:
        done = engine.generate(texts, max_new_tokens=3)
        assert engine.stats().pages_cached > 0
    assert [list(c.token_ids) for c in done] == [model.generate(t, 3) for t in texts]


def test_new_weights_forget_what_old_ones_wrote() -> None:
    model = TinyModel(windows=(0,))
    text = [5, 4, 3, 2, 1, 0, 1, 2, 3, 4]
    with make_engine(model) as engine:
        (old,) = engine.generate([text], max_new_tokens=6)
        with torch.no_grad():
            model.qkv[0].weight.mul_(-1.0)
        (new,) = engine.generate([text], max_new_tokens=6)
        assert engine.stats().prompt_tokens_reused == 0
        assert list(new.token_ids) == model.generate(text, 6) != list(old.token_ids)
        engine.generate([text], max_new_tokens=6)
        assert engine.stats().prompt_tokens_reused == 8
        engine.forget_prefixes()
        engine.generate([text], max_new_tokens=6)
        assert engine.stats().prompt_tokens_reused == 8


@pytest.mark.parametrize(("W", "I"), [(1, 1), (2, 1), (2, 3)])
@pytest.mark.parametrize("run_ahead", [1, 3])
def test_pages_behind_every_window_return(W: int, I: int, run_ahead: int) -> None:
    """Longer together than the pool, and yet nobody is preempted; late steps still read theirs."""
    model = TinyModel(windows=(5, 12))
    texts = prompts(4, seed=8, longest=6)
    dcp = DCP(VirtualGroup(W), I) if W > 1 else None
    pages = -(-96 // (4 * W)) + 12
    with make_engine(
        model, dcp=dcp, num_pages=pages, run_ahead=run_ahead, stream=LaggingStream(pace=2)
    ) as engine:
        requests = [engine.submit(t, max_new_tokens=80) for t in texts]
        while engine.busy:
            engine.step()
        assert engine.stats().preemptions == 0
        assert engine.stats().pages_taken == 0
    assert [r.token_ids for r in requests] == [model.generate(t, 80) for t in texts]


def test_a_window_of_one_layer_keeps_what_another_layer_sees(model: TinyModel) -> None:
    with make_engine(model) as engine:
        request = engine.submit([1, 2, 3], max_new_tokens=40)
        while len(request.token_ids) < 30:
            engine.step()
            engine.poll()
        assert None not in engine._scheduler.pages.pages_of(0)


def last_come(engine: Engine) -> Plan:
    """A policy of somebody else: the latest request first, chunks of three, one row a step."""
    for work in reversed(engine.work()):
        if work.decodes:
            return Plan(decode=(work.request,))
        if work.left and (work.seated or engine.stats().running < 4):
            return Plan(prefill=((work.request, min(3, work.left)),))
    return Plan()


@pytest.mark.parametrize("run_ahead", [1, 2])
def test_a_scheduler_of_ones_own(model: TinyModel, run_ahead: int) -> None:
    texts = prompts(4, seed=2, longest=12)
    stream = LaggingStream(pace=2)
    with make_engine(model, stream=stream, run_ahead=run_ahead) as engine:
        requests = [engine.submit(t, params(i)) for i, t in enumerate(texts)]
        while engine.busy:
            if last_come(engine) == Plan():
                engine.poll(0.001)
            else:
                engine.launch(last_come(engine))
        check(engine, requests, alone(model, texts))


def test_preemption_by_plan(model: TinyModel) -> None:
    with make_engine(model, stream=LaggingStream(pace=2)) as engine:
        request = engine.submit([1, 2, 3], max_new_tokens=20)
        for _ in range(60):
            if len(request.token_ids) in (3, 8) and request.preemptions < 2:
                engine.launch(Plan(preempt=(request,)))
            engine.step()
        while engine.busy:
            engine.step()
        assert request.preemptions == 2
        assert request.token_ids == model.generate([1, 2, 3], 20)


def test_plans_that_cannot_be_launched_change_nothing(model: TinyModel) -> None:
    with make_engine(model, max_batch=2, num_pages=24) as engine:
        running = [engine.submit([i] * 5, max_new_tokens=20) for i in range(2)]
        waiting = engine.submit([9] * 90, max_new_tokens=2)
        for _ in range(4):
            engine.step()
        engine.poll(1.0)
        before = engine.stats()
        first = running[0]
        for plan, message in (
            (Plan(decode=(first, first)), "each request once"),
            (Plan(decode=(waiting,)), "plan.decode: wanted requests that can decode"),
            (Plan(prefill=((first, 1),)), "plan.prefill: wanted requests with a prompt left"),
            (Plan(prefill=((waiting, 91),)), "wanted chunks of 1 to 90 tokens, got 91"),
            (Plan(prefill=((waiting, 17),)), "at most 16 token places, got 17"),
            (Plan(prefill=((waiting, 4),)), "at most 0 new requests"),
            (Plan(prefill=((waiting, 4),), preempt=(first,)), "pages, got 23"),
            (Plan(preempt=(waiting,)), "plan.preempt: wanted requests in a slot"),
        ):
            with pytest.raises(ConfigError, match=message):
                engine.launch(plan)
        assert engine.stats() == before
        while engine.busy:
            engine.step()
        assert first.token_ids == model.generate([0] * 5, 20)
        assert waiting.token_ids == model.generate([9] * 90, 2)


def test_poll_waits_for_what_is_in_flight(model: TinyModel) -> None:
    with make_engine(model, stream=LaggingStream(pace=1)) as engine:
        assert engine.poll(0.01) == []  # nothing is in flight: nothing to wait for
        engine.submit([1, 2], max_new_tokens=1)
        engine.step()
        assert engine.poll() == []
        (event,) = engine.poll(60.0)
        assert event.finished


def test_a_caller_that_never_polls_is_refused_before_memory_is(model: TinyModel) -> None:
    with make_engine(model, max_queue=3) as engine:
        for _ in range(3):
            engine.submit([1], max_new_tokens=1)
            while engine.busy:
                engine.step()
        with pytest.raises(QueueFullError, match="3 requests have ended and were not polled"):
            engine.submit([1], max_new_tokens=1)
        assert len(engine.poll()) == 3
        engine.submit([1], max_new_tokens=1)
