"""What a model keeps of its slots follows the tokens, whatever drafts, chunks and batches."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from graphattn import (
    DCP,
    ConfigError,
    DraftModel,
    FinishReason,
    NGram,
    Plan,
    UnsupportedModelError,
    VirtualGroup,
)
from graphattn.engine import Engine
from graphattn.models.contract import ModelStep, SlotTensor
from tests.runtime.lagging_stream import LaggingStream
from tests.runtime.scripted_drafts import Scripted
from tests.runtime.serving import make_engine, prompts, serve
from tests.runtime.tiny_model import TinyModel
from tests.runtime.tiny_recurrent import TinyRecurrent

# every prompt begins with a token of its own, by which a script knows it
JOBS = [([i, *p[1:]], 2 + 7 * i % 19) for i, p in enumerate(prompts(8, seed=41, longest=30))]
POISON = 60


@pytest.fixture(scope="module")
def model() -> TinyRecurrent:
    return TinyRecurrent()


@pytest.fixture(scope="module")
def expected(model: TinyRecurrent) -> list[list[int]]:
    return [model.generate(p, n) for p, n in JOBS]


def scripted(script: Any, expected: list[list[int]], k: int = 3) -> Scripted:
    return Scripted(k, [[*p, *e] for (p, _), e in zip(JOBS, expected, strict=True)], script)


def test_the_recurrences_decide_tokens(
    model: TinyRecurrent, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the oracle: a state, a past input or a count that is off gives other tokens."""
    assert len({t for tokens in expected for t in tokens}) > 10
    for name in ("FIRST_COUNT", "FIRST_STATE"):
        monkeypatch.setattr(f"tests.runtime.tiny_recurrent.{name}", 4)
        assert [model.generate(p, n) for p, n in JOBS[:2]] != expected[:2]
        monkeypatch.undo()


@pytest.mark.parametrize("max_tokens", [5, 16, 64])
def test_chunks_of_any_size(
    model: TinyRecurrent, expected: list[list[int]], max_tokens: int
) -> None:
    backend = "eager" if max_tokens == 5 else "host"
    with make_engine(model, max_tokens=max_tokens, backend=backend) as engine:
        assert [r.token_ids for r in serve(engine, JOBS)] == expected
        assert engine.stats().fallbacks == 0


@pytest.mark.parametrize(
    ("script", "k", "run_ahead", "backend"),
    [
        ("right", 3, 1, "host"),
        ("right", 1, 3, "eager"),
        ("wrong", 3, 2, "host"),
        ("on and off", 3, 1, "host"),
        ("on and off", 2, 3, "host"),
        ("mixed", 4, 2, "host"),
        ("mixed", 3, 3, "eager"),
    ],
)
def test_rejected_drafts_leave_no_trace(
    model: TinyRecurrent,
    expected: list[list[int]],
    script: Any,
    k: int,
    run_ahead: int,
    backend: str,
) -> None:
    """Elsewhere a step without drafts, after one that accepted some, read stale slot state."""
    speculate = scripted(script, expected, k)
    options: dict[str, Any] = {"run_ahead": run_ahead, "backend": backend, "max_tokens": 21}
    with make_engine(model, stream=LaggingStream(2), speculate=speculate, **options) as engine:
        assert [r.token_ids for r in serve(engine, JOBS)] == expected
        stats = engine.stats()
    assert stats.tokens_drafted > 0
    rejected = stats.tokens_drafted - stats.tokens_accepted
    assert (stats.tokens_accepted == 0) == (script == "wrong")
    assert (rejected == 0) == (script in ("right", "on and off"))


@pytest.mark.parametrize(("W", "I"), [(2, 1), (4, 3)])
def test_ranks_of_a_sharded_cache_keep_the_same(
    model: TinyRecurrent, expected: list[list[int]], W: int, I: int
) -> None:
    options: dict[str, Any] = {"dcp": DCP(VirtualGroup(W), I), "max_tokens": 21}
    with make_engine(model, speculate=scripted("mixed", expected), **options) as engine:
        assert [r.token_ids for r in serve(engine, JOBS)] == expected
        assert engine.verify(4).ok


def a_plan(engine: Engine, rng: random.Random) -> Plan:
    """Some of the work: chunks of 1 to 6 tokens, and now and then a preemption."""
    left, prefill, decode, preempt = engine.config.bounds.max_tokens, [], [], []
    slots = engine.config.bounds.max_batch - engine.stats().running
    pages = engine._scheduler.pages.available
    for work in engine.work():
        if work.seated and rng.random() < 0.15:
            preempt.append(work.request)
        elif work.decodes and left >= (q := engine.config.bounds.decode_query_len):
            if work.pages <= pages and rng.random() < 0.8:
                decode.append(work.request)
                left, pages = left - q, pages - work.pages
        elif work.left and left and (work.seated or (slots and work.pages <= pages)):
            count = min(rng.randint(1, 6), work.left, left)
            prefill.append((work.request, count))
            left -= count
            if not work.seated:
                slots, pages = slots - 1, pages - work.pages
                if engine._scheduler.admission_columns(work.request) > 8:
                    break
    return Plan(tuple(decode), tuple(prefill), tuple(preempt))


def test_any_plan_and_preemptions(model: TinyRecurrent, expected: list[list[int]]) -> None:
    """A preempted request starts anew, from the fill values, and comes to the same tokens."""
    rng = random.Random(2)
    with make_engine(model, speculate=scripted("mixed", expected), max_tokens=21) as engine:
        requests = [engine.submit(p, max_new_tokens=n) for p, n in JOBS]
        while engine.busy:
            engine.launch(a_plan(engine, rng))
        assert [r.token_ids for r in requests] == expected
        assert engine.stats().preemptions > 5


def test_cancelled_requests_leave_their_slots_to_others(
    model: TinyRecurrent, expected: list[list[int]]
) -> None:
    rng = random.Random(1)
    with make_engine(model, speculate=scripted("right", expected), run_ahead=3) as engine:
        for round_ in range(4):
            requests = [engine.submit(p, max_new_tokens=n) for p, n in JOBS]
            for _ in range(rng.randint(2, 9)):
                engine.step()
            spared = requests[round_ % 8]
            for request in requests:
                if request is not spared:
                    engine.cancel(request)
            while engine.busy:
                engine.step()
            assert spared.token_ids == expected[round_ % 8]


def kept(engine: Engine) -> dict[str, Tensor]:
    return engine._runner.memory.slots.tensors()


def bits(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone().view(torch.uint8) for name, tensor in tensors.items()}


def test_padding_and_ended_slots_keep_every_bit(
    model: TinyRecurrent, expected: list[list[int]]
) -> None:
    """Elsewhere a padding row that was mapped to slot 0 wrote slot 0's state."""
    with make_engine(model, speculate=scripted("mixed", expected), max_tokens=21) as engine:
        for tensor in kept(engine).values():
            tensor.view(torch.uint8).random_()  # NaN of any payload among them
        before = bits(kept(engine))
        for bucket in engine.config.buckets:
            assert engine.step(bucket)
            engine.poll()
        for name, tensor in bits(kept(engine)).items():
            assert torch.equal(tensor, before[name]), name
        (request,) = engine.generate([JOBS[1][0]], max_new_tokens=9)
        assert len(request.token_ids) == 9
        after = bits(kept(engine))
        engine.step(engine.config.buckets.decode[0])  # the ended slot has no row any more
        changed = {
            int(slot)
            for name, tensor in after.items()
            for slot in (tensor != before[name]).view(4, -1).any(1).nonzero()
        }
        assert len(changed) == 1, "one request, one slot"
        for name, tensor in bits(kept(engine)).items():
            assert torch.equal(tensor, after[name]), name


def test_padding_rows_beside_slot_0_leave_it_alone(model: TinyRecurrent) -> None:
    """They count as rows of slot 0 wherever -1 would be an index out of range."""
    with make_engine(model, buckets=[4]) as engine:
        (done,) = engine.generate([[5, 6]], max_new_tokens=12)
        assert list(done.token_ids) == model.generate([5, 6], 12)
        assert engine._scheduler.free_slots[-1] == 0, "it was slot 0"


def test_a_row_of_an_ended_slot_keeps_every_bit(model: TinyRecurrent) -> None:
    """The host runs ahead: it launches rows for a request that has ended meanwhile."""
    with make_engine(model, run_ahead=3, stream=LaggingStream(1), max_batch=1) as engine:
        stop = model.generate([5, 6], 3)
        request = engine.submit([5, 6], max_new_tokens=30, stop_token_ids=[stop[2]])
        while not request.finished:
            engine.step()
            engine.poll()
        in_flight = engine.stats().in_flight
        before = bits(kept(engine))
        engine.poll(timeout=1)
        assert in_flight > 0, "the case is not reached"
        for name, tensor in bits(kept(engine)).items():
            assert torch.equal(tensor, before[name]), name


def test_capture_changes_nothing(model: TinyRecurrent) -> None:
    with make_engine(model) as engine:
        for name, tensor in kept(engine).items():
            assert bool((tensor == model.slot_tensors[name].fill).all()), name


class Poisonable(TinyRecurrent):
    """Its states become NaN where the input is `POISON`."""

    def _gated(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = super()._gated(layer, x)
        return a, b + self.bad

    def forward(self, step: ModelStep) -> Tensor:
        self.bad = torch.where(step.input_ids == POISON, float("nan"), 0.0)[:, None]
        return super().forward(step)


def test_a_nan_request_harms_neither_its_neighbours_nor_its_heir(model: TinyRecurrent) -> None:
    clean = {(i, i + 1): model.generate([i, i + 1], 14) for i in range(6)}
    clean = {prompt: tokens for prompt, tokens in clean.items() if POISON not in tokens}
    first, second = list(clean)[:2]
    with make_engine(Poisonable(), max_batch=2, max_tokens=8, speculate=NGram(2)) as engine:
        neighbour = engine.submit(first, max_new_tokens=14)
        poisoned = engine.submit([1, POISON, *range(2, 12)], max_new_tokens=20)  # some chunks
        while not poisoned.finished:
            engine.step()
            engine.poll()
        assert poisoned.finish_reason is FinishReason.ERROR
        assert bool(kept(engine)["state.0"].isnan().any())
        heir = engine.submit(second, max_new_tokens=14)
        while engine.busy:
            engine.step()
        assert neighbour.token_ids == clean[first]
        assert heir.token_ids == clean[second]


def test_such_requests_share_no_prefixes(model: TinyRecurrent) -> None:
    prompt = [7] * 20
    with make_engine(model) as engine:
        for _ in range(2):
            (done,) = engine.generate([prompt], max_new_tokens=6)
            assert list(done.token_ids) == model.generate(prompt, 6)
        assert engine.stats().prompt_tokens_reused == 0
        assert "slot tensors: 580 bytes per slot; requests share no prefixes" in str(
            engine.report()
        )


def test_replay_verifies_and_audits_clean(model: TinyRecurrent, expected: list[list[int]]) -> None:
    with make_engine(model, speculate=scripted("mixed", expected), max_tokens=21) as engine:
        report = engine.verify(15)
        assert report.ok, str(report)
        assert engine.audit().findings == ()


@pytest.mark.parametrize("forgotten", ["past.1", "state.0", "even"])
def test_a_replay_that_forgets_to_keep_is_caught(model: TinyRecurrent, forgotten: str) -> None:
    engine = make_engine(model)

    def forgetful(program: Any) -> Any:
        def run() -> None:
            before = kept(engine)[forgotten].clone()
            program()
            kept(engine)[forgotten].copy_(before)

        return run

    for bucket, graph in engine._runner.graphs.items():
        graph.replay = forgetful(engine._runner.programs[bucket])  # type: ignore[method-assign]
    report = engine.verify(8)
    assert report.difference is not None
    assert report.difference.name == f"slots.{forgotten}"


class Keeping(TinyModel):
    """Keeps "x", in a way of the test's choice."""

    slot_tensors: Any = {"x": SlotTensor((3,))}  # noqa: RUF012

    def forward(self, step: ModelStep) -> Tensor:
        self.use(step)
        return super().forward(step)

    def use(self, step: ModelStep) -> None:
        raise NotImplementedError


def test_a_wrong_use_is_named() -> None:
    def made(use: Any) -> Engine:
        return make_engine(type("Case", (Keeping,), {"use": use})())

    with pytest.raises(Exception, match="slot tensors x and its call did not keep them"):
        made(lambda self, step: None)
    with pytest.raises(Exception, match=r"keep\('x'\): wanted torch.float32 \[1, 1, 3\], rows x"):
        made(lambda self, step: step.slots.keep("x", step.slots.start("x")))
    with pytest.raises(Exception, match=r"wanted a slot tensor of the model \(x\), got 'y'"):
        made(lambda self, step: step.slots.start("y"))
    for specs in ({"x": (3,)}, [SlotTensor((3,))], {"x": SlotTensor((0,))}):
        case = type("Case", (TinyModel,), {"slot_tensors": specs})()
        with pytest.raises(UnsupportedModelError, match="slot_tensors: wanted a mapping"):
            make_engine(case)


def test_such_a_model_does_not_draft(model: TinyRecurrent) -> None:
    with pytest.raises(UnsupportedModelError, match="draft model: it keeps slot tensors"):
        make_engine(TinyModel(), speculate=DraftModel(model, 2))
    with pytest.raises(ConfigError, match="max_tokens: wanted at least"):  # its own bounds hold
        make_engine(model, speculate=NGram(4))
