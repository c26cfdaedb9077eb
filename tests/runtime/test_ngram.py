"""Prompt lookup in the step: it never changes a token, and accepts exactly what it should."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from graphattn import DCP, FinishReason, NGram, Request, SamplingParams, VirtualGroup
from graphattn.engine import Engine
from graphattn.models.contract import ModelStep
from tests.runtime.lagging_stream import LaggingStream
from tests.runtime.serving import make_engine, prompts
from tests.runtime.tiny_model import TinyModel

VOCAB = 9
LAYOUTS = [(1, 1), (2, 1), (2, 16), (4, 1), (4, 16)]


@dataclass(frozen=True)
class Job:
    """A request to be made."""

    prompt: tuple[int, ...]
    params: SamplingParams


def _jobs() -> list[Job]:
    """Repetitive and random prompts, greedy and sampled, of lengths 1 to 40."""
    rng = random.Random(5)
    repetitive = [([1, 2, 3, 4] * 9)[:33], [5] * 9, [1, 2] * 7 + [3], [8, 0, 7] * 4, [6]]
    jobs = []
    for i, prompt in enumerate([*repetitive, *prompts(5, seed=9, longest=40, vocab=VOCAB)]):
        drawn = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1} if i % 3 == 2 else {}
        params = SamplingParams(
            max_new_tokens=5 + 11 * i % 28,
            stop_token_ids=(rng.randrange(VOCAB),) if i % 4 == 3 else (),
            seed=i,
            **drawn,  # type: ignore[arg-type]
        )
        jobs.append(Job(tuple(prompt), params))
    return jobs


JOBS = _jobs()


class CyclicModel(TinyModel):
    """Counts modulo `VOCAB`, so that acceptance can be told by hand."""

    def __init__(self, max_seq_len: int = 96) -> None:
        super().__init__(vocab_size=VOCAB, windows=(0,), max_seq_len=max_seq_len)
        self.next = 1e4 * torch.eye(VOCAB).roll(1, 1)

    def forward(self, step: ModelStep) -> Tensor:
        return super().forward(step) + self.next[step.input_ids[step.logits_token]]


def cycle(start: int, count: int) -> list[int]:
    """The tokens that `CyclicModel` makes of `start`, which they begin with."""
    return [(start + i) % VOCAB for i in range(count)]


def drive(
    engine: Engine,
    jobs: Sequence[Job],
    *,
    seed: int = 0,
    after_step: Callable[[], None] = lambda: None,
) -> list[Request]:
    """Submit the jobs at random times between steps; run to the end."""
    rng, waiting = random.Random(seed), list(jobs)
    requests: list[Request] = []
    while waiting or engine.busy:
        while waiting and rng.random() < 0.4:
            job = waiting.pop(0)
            requests.append(engine.submit(job.prompt, job.params))
        engine.step()
        after_step()
        engine.poll()
    return requests


def outcome(request: Request) -> tuple[list[int], FinishReason | None]:
    return request.token_ids, request.finish_reason


def follow(tokens: Sequence[int], max_match: int = 3) -> Sequence[int]:
    """What followed the latest earlier occurrence of the longest tail that has one."""
    for n in range(min(max_match, len(tokens) - 1), 0, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                return tokens[end:]
    return ()


def lookups(request: Request, k: int) -> Iterator[tuple[int, int]]:
    """(drafted, accepted) of each decode step, from the tokens that came out."""
    tokens = [*request.prompt, *request.token_ids]
    length = len(request.prompt) + 1
    while length < len(tokens):
        future = tokens[length:]
        drafts = list(
            itertools.islice(
                itertools.cycle(follow(tokens[:length])), min(k, request.stop_len - length - 1)
            )
        )
        pairs = zip(drafts, future, strict=False)
        right = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        emitted = min(right + 1, len(future))  # a stop token ends a row inside its drafts
        yield len(drafts), emitted - 1
        length += emitted


def assert_counters(engine: Engine, requests: Sequence[Request], k: int) -> None:
    """Nothing was drafted or accepted but what lookup in the final tokens tells."""
    drafted, accepted = [0] * k, [0] * k
    for request in requests:
        steps = list(lookups(request, k))
        assert request.drafted == sum(d for d, _ in steps)
        assert request.accepted == sum(a for _, a in steps)
        for place in range(k):
            drafted[place] += sum(place < d for d, _ in steps)
            accepted[place] += sum(place < a for _, a in steps)
    stats = engine.stats()
    assert stats.drafted_by_place == tuple(drafted)
    assert stats.accepted_by_place == tuple(accepted)
    assert (stats.tokens_drafted, stats.tokens_accepted) == (sum(drafted), sum(accepted))


@pytest.fixture(scope="module")
def model() -> TinyModel:
    """Its tokens repeat often, and not always."""
    model = TinyModel(vocab_size=VOCAB, windows=(5, 0), softcap=2.0, sinks=True)
    model.position.weight.mul_(0.3)
    return model


@pytest.fixture(scope="module")
def expected(model: TinyModel) -> list[tuple[list[int], FinishReason | None]]:
    """Without drafts: the greedy ones recomputed from scratch, the sampled ones by an engine."""
    with make_engine(model, backend="eager") as engine:
        plain = [outcome(request) for request in drive(engine, JOBS, seed=99)]
    for job, (token_ids, _) in zip(JOBS, plain, strict=True):
        params = job.params
        if params.temperature == 0.0:
            count, stop = params.max_new_tokens, params.stop_token_ids
            assert token_ids == model.generate(list(job.prompt), count, stop)
    return plain


def virtual(W: int, I: int, k: int) -> DCP | None:
    return DCP(VirtualGroup(W), I, "a2a" if k % 2 else "ag_rs") if W > 1 else None


@pytest.mark.parametrize("k", range(1, 6))
@pytest.mark.parametrize(("W", "I"), LAYOUTS)
def test_drafts_never_change_a_token(
    model: TinyModel,
    expected: list[tuple[list[int], FinishReason | None]],
    W: int,
    I: int,
    k: int,
) -> None:
    """Elsewhere acceptance rose while texts were wrong, so tokens are the judge; acceptance fell
    while they were right, so it is held too. Captured and eager, one to three steps ahead."""
    options = {"backend": "eager" if (k + W) % 3 == 0 else "host", "run_ahead": 1 + k % 3}
    with make_engine(
        model, speculate=NGram(k), max_tokens=24, dcp=virtual(W, I, k), **options
    ) as engine:
        requests = drive(engine, JOBS, seed=k)
        assert [outcome(request) for request in requests] == expected
        assert_counters(engine, requests, k)
        assert engine.stats().tokens_accepted > 0
        assert engine.stats().tokens_accepted < engine.stats().tokens_drafted
        assert engine.stats().fallbacks == 0


@pytest.mark.parametrize("run_ahead", [1, 2, 3])
def test_steps_that_run_late_change_nothing(
    model: TinyModel,
    expected: list[tuple[list[int], FinishReason | None]],
    run_ahead: int,
) -> None:
    stream, dcp = LaggingStream(pace=2), virtual(4, 2, 3) if run_ahead == 2 else None
    with make_engine(
        model, speculate=NGram(3), dcp=dcp, stream=stream, run_ahead=run_ahead
    ) as engine:
        requests = drive(engine, JOBS, seed=run_ahead)
        assert [outcome(request) for request in requests] == expected
        assert_counters(engine, requests, 3)


def test_one_step_mixes_unequal_drafts_and_prefill(
    model: TinyModel, expected: list[tuple[list[int], FinishReason | None]]
) -> None:
    """Rows with 0 to k drafts beside chunks of prompts, done rows and padding."""
    drafts_beside_prefill: set[tuple[int, ...]] = set()
    with make_engine(model, speculate=NGram(3), max_tokens=19, run_ahead=1) as engine:
        state, seats = engine._runner.memory.state, engine._scheduler._seats

        def look() -> None:
            engine.poll()
            if any(seat.prefilling for seat in seats.values()):
                slots = [seat.slot for seat in seats.values() if not seat.prefilling]
                drafts_beside_prefill.add(tuple(sorted(state.draft_count[slots].tolist())))

        requests = drive(engine, JOBS, seed=2, after_step=look)
        assert [outcome(request) for request in requests] == expected
    assert any(len(set(counts)) > 1 for counts in drafts_beside_prefill)
    assert {0, 1, 3} <= set(itertools.chain(*drafts_beside_prefill))


def test_acceptance_on_a_cycle() -> None:
    """The prompt shows the cycle once: every draft is right, and a step emits 1 + k tokens."""
    with make_engine(CyclicModel(), speculate=NGram(4), run_ahead=1, max_tokens=20) as engine:
        request = engine.submit(cycle(0, VOCAB + 3), max_new_tokens=24)
        while engine.busy:
            engine.step()
            engine.poll()
        assert request.token_ids == cycle(VOCAB + 3, 24)
        stats = engine.stats()
        # 1 at the end of the prompt, 4 steps of 5, and 2 drafts of the last 3 tokens
        assert stats.steps == 6
        assert stats.drafted_by_place == stats.accepted_by_place == (5, 5, 4, 4)
        assert (request.drafted, request.accepted) == (18, 18)


def test_a_chunk_may_leave_one_token_of_a_prompt() -> None:
    """Its slot then looks like one that decodes, and is given drafts; the row has no place for
    them."""
    with make_engine(CyclicModel(), speculate=NGram(4), run_ahead=1, max_tokens=20) as engine:
        request = engine.submit(cycle(0, 21), max_new_tokens=11)
        engine.step()
        assert engine._runner.memory.state.draft_count[0] == 4
        while engine.busy:
            engine.step()
            engine.poll()
        assert request.token_ids == cycle(21, 11)
        assert engine.stats().steps == 2 + 2
        assert (request.drafted, request.accepted) == (8, 8)


def test_acceptance_of_a_model(model: TinyModel) -> None:
    """A regression value: elsewhere acceptance fell to nothing while the text stayed right."""
    with make_engine(model, speculate=NGram(3), run_ahead=1) as engine:
        engine.generate([[8, 0, 7] * 4], max_new_tokens=40)
        stats = engine.stats()
        assert (stats.steps, stats.tokens_emitted) == (14, 40)
        assert stats.drafted_by_place == (12, 12, 11)
        assert stats.accepted_by_place == (10, 9, 7)


@pytest.mark.parametrize(("W", "I"), [(1, 1), (4, 1), (2, 16)])
def test_nothing_is_written_or_emitted_beyond_the_limits(W: int, I: int) -> None:
    """At max_seq_len and at each token limit; every token but the last was fed, no draft more.
    Elsewhere draft steps past the maximum length wrote to a page out of bounds."""
    k, untouched = 4, 777.0
    model = CyclicModel(max_seq_len=30)
    prompt = cycle(0, 20)
    options = {"max_tokens": 20, "max_batch": 1, "prefix_reuse": False}  # the pools are spoiled
    with make_engine(model, speculate=NGram(k), dcp=virtual(W, I, k), **options) as engine:
        for count in [*range(1, 2 * k + 2), 100]:
            for pool in engine._runner.pools().values():
                pool.fill_(untouched)
            (done,) = engine.generate([prompt], max_new_tokens=count)
            emitted = min(count, 30 - len(prompt))
            assert list(done.token_ids) == cycle(20, emitted)
            assert done.finish_reason is FinishReason.LENGTH
            written = sum(
                int((pool != untouched).any(-1).any(1).sum())
                for name, pool in engine._runner.pools().items()
                if "key" in name
            )
            assert written == len(prompt) + emitted - 1
            history = engine._runner.memory.state.history[0].tolist()
            assert history[: len(prompt) + emitted] == cycle(0, len(prompt) + emitted)


@pytest.mark.parametrize("dcp", [None, DCP(VirtualGroup(2), 3)], ids=["", "dcp"])
def test_a_stop_token_inside_accepted_drafts_ends_the_text(dcp: DCP | None) -> None:
    """At every place of a row; the drafts after it were right and are not emitted."""
    k, inside = 4, 0
    with make_engine(CyclicModel(), speculate=NGram(k), dcp=dcp, max_tokens=20) as engine:
        for stop in range(VOCAB):
            request = engine.submit(cycle(0, 2 * VOCAB), max_new_tokens=50, stop_token_ids=(stop,))
            while engine.busy:
                engine.step()
                engine.poll()
            assert request.token_ids == cycle(0, stop + 1)
            assert request.finish_reason is FinishReason.STOP
            inside += request.accepted < request.drafted
        # but for token 0, which the prompt gave, and 5, which came after four accepted drafts
        assert inside == VOCAB - 2


@pytest.mark.parametrize(("W", "I"), [(1, 1), (2, 3), (4, 16)])
def test_replay_verifies_and_audits_clean(model: TinyModel, W: int, I: int) -> None:
    with make_engine(
        model, speculate=NGram(3), max_tokens=20, dcp=virtual(W, I, 2 + W % 2)
    ) as engine:
        report = engine.verify(30)
        assert report.ok, str(report)
        assert engine.audit().findings == ()
