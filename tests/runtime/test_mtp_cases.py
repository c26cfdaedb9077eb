"""Faults that others had with drafts, a sharded cache and graphs together, one by one, with MTP.

The letters are the kinds: B is context parallelism, drafts and graphs; C is padding and poison; E
is what a drafter does to its neighbours. Four ranks unless said.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from graphattn import DCP, MTP, FinishReason, SamplingParams, VirtualGroup
from graphattn.engine import Engine
from tests.runtime.lagging_stream import LaggingStream
from tests.runtime.serving import make_engine, serve
from tests.runtime.test_mtp import Watch, check_partly_wrong
from tests.runtime.test_replay import HUGE, poison, poison_free_pages
from tests.runtime.tiny_mtp import POISON, KnowingMTP, TinyTarget, windowful

TEXTS = windowful(5, seed=4, longest=30)
TOKENS = 12


@pytest.fixture(scope="module")
def target() -> TinyTarget:
    return TinyTarget()


@pytest.fixture(scope="module")
def expected(target: TinyTarget) -> list[list[int]]:
    return [target.generate(text, TOKENS) for text in TEXTS]


def engine(target: TinyTarget, speculate: MTP, **options: Any) -> Engine:
    given = {"dcp": DCP(VirtualGroup(4)), "max_tokens": 24, "max_seq_len": 64} | options
    return make_engine(target, speculate=speculate, **given)


def generated(engine: Engine, texts: list[list[int]] = TEXTS) -> list[list[int]]:
    return [list(c.token_ids) for c in engine.generate(texts, max_new_tokens=TOKENS)]


@pytest.mark.parametrize("reduce", ["a2a", pytest.param("ag_rs", marks=pytest.mark.slow)])
def test_b1_one_draft_over_four_ranks_in_a_graph(
    target: TinyTarget, expected: list[list[int]], reduce: str
) -> None:
    """Output was cut or looped with all three on; any one of them off was fine."""
    dcp = DCP(VirtualGroup(4), 1, reduce)  # type: ignore[arg-type]
    module = KnowingMTP(target, fails=True)
    for backend in ("host", "eager"):
        with engine(target, MTP(1, module), dcp=dcp, backend=backend) as four:
            assert generated(four) == expected
    with engine(target, MTP(1, module), dcp=None) as one:
        assert generated(one) == expected


def test_b2_b3_b4_one_memory_for_all_graphs(target: TinyTarget, expected: list[list[int]]) -> None:
    """B2: a tensor was made anew per step and the graph kept the old address. B3: a larger eager
    step after capture regrew a workspace. B4: graphs recycled each other's buffers: fine with four
    graphs, garbled with eight."""
    with engine(target, MTP(3, KnowingMTP(target, 2)), max_batch=8, max_tokens=40) as many:
        assert len(list(many.config.buckets)) >= 5

        def addresses() -> dict[str, int]:
            named = (
                many._runner.memory.tensors()
                | many._runner.pools()
                | many._runner.drafter.scratch()
            )
            return {n: t.data_ptr() for n, t in (named | many._runner.drafter.lasting()).items()}

        before = addresses()
        assert generated(many) == expected
        largest = many.config.buckets.mixed[-1]
        many._runner.programs[largest]()
        jobs = [(text, 1 + 5 * i % TOKENS) for i, text in enumerate(TEXTS * 2)]
        for request in serve(many, jobs, seed=3):
            text, count = list(request.prompt), request.params.max_new_tokens
            assert request.token_ids == expected[TEXTS.index(text)][:count]
        assert addresses() == before
        used = [bucket.name for bucket, count in many._runner.replays.items() if count]
        assert len(used) >= 4, used


def test_b5_b6_b7_tokens_under_load_and_what_is_accepted(
    target: TinyTarget, expected: list[list[int]]
) -> None:
    """B5: positions frozen at query lengths above one lowered scores while acceptance stayed. B6:
    host lengths met another step's device data: higher acceptance, wrong text, only under load. B7:
    text right, acceptance fell to nothing. So both are held, with steps that run late."""
    module, counts = KnowingMTP(target, fails=True), []
    for stream in (None, LaggingStream(pace=1)):
        with engine(target, MTP(3, module), stream=stream, run_ahead=3) as loaded:
            assert generated(loaded, TEXTS * 2) == expected * 2
            stats = loaded.stats()
            counts.append((stats.drafted_by_place, stats.accepted_by_place))
    assert counts[0] == counts[1] == ((46, 44, 42), (20, 20, 16))


def test_b8_every_decode_batch_hits_a_graph(target: TinyTarget, expected: list[list[int]]) -> None:
    """Buckets were no multiples of 1 + k: half of all batches ran eagerly, unnoticed."""
    with engine(target, MTP(2, KnowingMTP(target)), max_batch=5) as whole:
        for live in (5, 1, 4, 2, 3):
            assert generated(whole, TEXTS[:live]) == expected[:live]
        assert whole.stats().fallbacks == 0


@pytest.mark.parametrize(
    ("depth", "W", "I"), [(1, 4, 1), (3, 1, 1), pytest.param(1, 2, 16, marks=pytest.mark.slow)]
)
def test_b9_nothing_beyond_the_limits(depth: int, W: int, I: int) -> None:
    """At max_seq_len and at every token limit: draft steps wrote to a page out of bounds."""
    k, end, untouched = 4, 30, 777.0
    model = TinyTarget(max_seq_len=end, windows=(0,))  # no page returns while a request runs
    prompt = [(3 * i) % 60 for i in range(20)]
    tokens = model.generate(prompt, 100)
    dcp = DCP(VirtualGroup(W), I) if W > 1 else None
    speculate = MTP(k, KnowingMTP(model, depth))
    options = {"max_batch": 1, "max_seq_len": None, "prefix_reuse": False}
    with engine(model, speculate, dcp=dcp, **options) as limited:
        for count in [*range(1, 2 * k + 2), 100]:
            for pool in limited._runner.pools().values():
                pool.fill_(untouched)
            limited._runner.memory.state.page_table.fill_(
                HUGE
            )  # a page that is not set is out of bounds
            (done,) = limited.generate([prompt], max_new_tokens=count)
            assert list(done.token_ids) == tokens[:count]
            assert done.finish_reason is FinishReason.LENGTH
            written = {"target": 0, "mtp": 0}
            for name, pool in limited._runner.pools().items():
                if "key" in name:
                    kind = "mtp" if name.startswith("mtp.") else "target"
                    written[kind] += int((pool != untouched).any(-1).any(1).sum())
            assert written["target"] == len(prompt) + len(done.token_ids) - 1
            assert written["mtp"] <= depth * (end - 1)  # no token follows position max_seq_len - 1
            history = limited._runner.memory.state.history[0, : len(prompt) + len(done.token_ids)]
            assert history.tolist() == prompt + tokens[:count]


@pytest.mark.parametrize("dcp", [None, DCP(VirtualGroup(4), 3)], ids=["alone", "dcp"])
def test_stop_tokens_inside_accepted_drafts(target: TinyTarget, dcp: DCP | None) -> None:
    tokens = target.generate(TEXTS[1], 9)
    with engine(target, MTP(4, KnowingMTP(target)), dcp=dcp) as stopping:
        for i, stop in enumerate(tokens):
            (done,) = stopping.generate([TEXTS[1]], max_new_tokens=50, stop_token_ids=[stop])
            assert list(done.token_ids) == tokens[: tokens.index(stop) + 1], i
            assert done.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("depth", [1, 2])
def test_b10_e9_rows_with_any_number_of_drafts(
    target: TinyTarget, expected: list[list[int]], depth: int
) -> None:
    """B10: unequal numbers per request were refused or mis-sized. E9: a step that accepts two or
    more, then one without drafts, read stale state."""
    rng, sizes = random.Random(depth), set()
    module = KnowingMTP(target, depth, fails=True)
    with engine(target, MTP(3, module), run_ahead=1) as uneven:
        watch, state = Watch(uneven), uneven._runner.memory.state
        requests = [uneven.submit(text, max_new_tokens=TOKENS) for text in TEXTS]
        while uneven.busy:
            uneven.step()
            uneven.poll()
            watch()
            for slot in range(uneven.config.bounds.max_batch):
                if int(state.draft_count[slot]):
                    state.draft_count[slot] = rng.choice([0, 3, int(state.draft_count[slot]), 1])
            sizes.add(tuple(state.draft_count.tolist()))
    assert [r.token_ids for r in requests] == expected
    assert any(len(set(step)) >= 3 for step in sizes)
    check_partly_wrong(watch)


@pytest.mark.parametrize(("depth", "backend"), [(1, "host"), (3, "eager")])
def test_nothing_relies_on_what_an_earlier_step_left(
    target: TinyTarget, expected: list[list[int]], depth: int, backend: str
) -> None:
    """Stale metadata and unused table columns are huge ids, free pages and scratch NaN. One prompt
    is a token longer than a step: what follows it is not known at the end of its first chunk."""
    speculate = MTP(3, KnowingMTP(target, depth))
    long = [i % POISON for i in range(25)]
    with engine(target, speculate, backend=backend, num_pages=64) as spoiled:
        requests = [spoiled.submit(text, max_new_tokens=TOKENS) for text in (long, *TEXTS)]
        poison(spoiled)
        while spoiled.busy:
            spoiled.step()
            spoiled.poll()
            poison(spoiled)
            poison_free_pages(spoiled)
            for tensor in spoiled._runner.drafter.scratch().values():
                tensor.fill_(float("nan") if tensor.is_floating_point() else HUGE)
        stats = spoiled.stats()
    assert [r.token_ids for r in requests] == [target.generate(long, TOKENS), *expected]
    assert stats.tokens_accepted == stats.tokens_drafted > 0


def test_c8_padding_touches_no_slot(target: TinyTarget) -> None:
    """A padding row mapped to slot 0 wrote slot 0's state."""
    with engine(target, MTP(2, KnowingMTP(target, 2))) as padded:
        requests = [padded.submit(text, max_new_tokens=30) for text in TEXTS[:2]]
        while min(len(r.token_ids) for r in requests) < 4:
            padded.step()
            padded.poll()
        inputs = padded._runner.memory.inputs
        for name in ("slot_of_row", "admit_generation", "page_updates"):
            getattr(inputs, name).fill_(-1)
        inputs.query_len.fill_(0)
        inputs.release.fill_(0)
        state = (
            padded._runner.memory.state.tensors()
            | padded._runner.pools()
            | padded._runner.drafter.lasting()
        )
        before = {name: tensor.clone() for name, tensor in state.items()}
        for graph in padded._runner.graphs.values():
            graph.replay()
        for name, tensor in state.items():
            assert torch.equal(tensor, before[name]), name


def test_c11_a_nan_request_harms_nobody() -> None:
    """Its hidden states, keys and logits are NaN; its pages go to the next request."""
    clean, model = TinyTarget(), TinyTarget(poisonable=True)
    texts = windowful(20, seed=1, longest=9)
    harmless = [p for p in texts if POISON not in clean.generate(p, 14)][:4]
    options = {"max_batch": 2, "num_pages": 12, "max_seq_len": 24, "dcp": DCP(VirtualGroup(2))}
    with engine(model, MTP(2, KnowingMTP(model)), **options) as mixed:
        neighbour = mixed.submit(harmless[0], max_new_tokens=14)
        poisoned = mixed.submit([1, 2, POISON], max_new_tokens=14)
        while not poisoned.finished:
            mixed.step()
        assert poisoned.finish_reason is FinishReason.ERROR
        assert poisoned.token_ids == []
        heirs = [mixed.submit(p, max_new_tokens=14) for p in harmless[1:]]
        while mixed.busy:
            mixed.step()
        stats = mixed.stats()
    assert neighbour.token_ids == clean.generate(harmless[0], 14)
    assert [h.token_ids for h in heirs] == [clean.generate(p, 14) for p in harmless[1:]]
    assert stats.tokens_accepted == stats.tokens_drafted > 0


def test_a_module_that_goes_nan_only_guesses_badly() -> None:
    """NaN in its own pages alone: the target's tokens and the rows beside it are unharmed."""
    clean = TinyTarget()
    texts = [[1, POISON, *TEXTS[3]], *TEXTS[:2]]
    with engine(clean, MTP(3, KnowingMTP(TinyTarget(poisonable=True)))) as half:
        assert generated(half, texts) == [clean.generate(t, TOKENS) for t in texts]
        spoiled = {n for n, pool in half._runner.pools().items() if bool(pool.isnan().any())}
    assert spoiled
    assert all(name.startswith("mtp.") for name in spoiled)


def test_e1_e4_targets_outputs_and_neighbours_are_as_without_drafts(target: TinyTarget) -> None:
    """E1: the drafter overwrote what the target had put out. E4: rows without drafts advanced their
    neighbour's random state: the same seed must give the same tokens beside drafting rows."""

    def served(speculate: MTP | None, together: bool) -> list[tuple[list[int], list[float]]]:
        with engine(target, speculate) as sampling:  # type: ignore[arg-type]
            requests = []
            for i, text in enumerate(TEXTS[:4]):
                params = SamplingParams(9, temperature=0.9 * (i % 2), seed=i, top_p=0.9)
                requests.append(sampling.submit(text, params))
                while sampling.busy and not together:
                    sampling.step()
            while sampling.busy:
                sampling.step()
            return [(r.token_ids, r.logprobs) for r in requests]

    drafted = served(MTP(2, KnowingMTP(target, fails=True)), together=True)
    for (ids, logs), (want_ids, want_logs) in zip(drafted, served(None, False), strict=True):
        assert ids == want_ids
        assert logs == pytest.approx(want_logs, abs=1e-4)
