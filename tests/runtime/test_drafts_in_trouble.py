"""Padding, poison, limits of buckets and target outputs, with drafts on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphattn import DraftModel, FinishReason, NGram, SamplingParams
from graphattn.draft import Speculation
from graphattn.engine import Engine
from graphattn.models.contract import ModelStep
from tests.runtime.serving import make_engine, prompts
from tests.runtime.tiny_model import TinyModel

POISON = 60  # a token id


class PoisonableModel(TinyModel):
    """Its keys and values are NaN where the input is `POISON`."""

    def forward(self, step: ModelStep) -> torch.Tensor:
        bad = torch.where(step.input_ids == POISON, float("nan"), 0.0)[:, None, None]

        class Poisoned:
            input_ids, positions, logits_token = step.input_ids, step.positions, step.logits_token

            def attend(
                self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
            ) -> torch.Tensor:
                return step.attend(layer, q, k + bad, v + bad)

        return super().forward(Poisoned())  # type: ignore[arg-type]


def drafters(target: TinyModel) -> dict[str, Speculation]:
    """One that is often wrong, one that is always right, one that reads the history."""
    wrong = PoisonableModel(num_q_heads=4, head_dim=4, windows=(3,), seed=5)
    return {
        "ngram": NGram(3),
        "wrong": DraftModel(wrong, 3),
        "right": DraftModel(target, 3),
    }


each_drafter = pytest.mark.parametrize("drafter", ["ngram", "wrong", "right"])


def drain(engine: Engine) -> None:
    while engine.busy:
        engine.step()


@each_drafter
def test_every_live_count_in_every_bucket(drafter: str) -> None:
    """No bucket is missing for any number of rows with drafts, and none is planned for fewer."""
    model = TinyModel(windows=(0,))
    texts = [[i + 1, i + 2] for i in range(5)]
    expected = [model.generate(p, 7) for p in texts]
    options: dict[str, Any] = {
        "max_batch": 5,
        "max_tokens": 24,
        "speculate": drafters(model)[drafter],
    }
    with make_engine(model, **options) as engine:
        for live in (5, 1, 4, 2, 3, 5):
            done = engine.generate(texts[:live], max_new_tokens=7)
            assert [list(c.token_ids) for c in done] == expected[:live]
        assert engine.stats().fallbacks == 0


@each_drafter
def test_padding_touches_no_slot(drafter: str) -> None:
    """Padding rows are -1 everywhere: slots without a row keep their state, drafts and KV."""
    model = TinyModel()
    with make_engine(model, max_tokens=24, speculate=drafters(model)[drafter]) as engine:
        requests = [engine.submit(p, max_new_tokens=30) for p in ([1, 2, 3], [7, 5, 7, 5])]
        while min(len(r.token_ids) for r in requests) < 5:
            engine.step()
            engine.poll()
        inputs, state = engine._runner.memory.inputs, engine._runner.memory.state.tensors()
        for name in ("slot_of_row", "admit_generation", "page_updates"):
            getattr(inputs, name).fill_(-1)
        inputs.query_len.fill_(0)
        inputs.release.fill_(0)
        lasting = {n: t.clone() for n, t in (state | engine._runner.pools()).items()}
        for graph in engine._runner.graphs.values():
            graph.replay()
        for name, tensor in (state | engine._runner.pools()).items():
            assert torch.equal(tensor, lasting[name]), name
        inputs.slot_of_row[0], inputs.query_len[0] = 1, 4
        engine._runner.graphs[engine.config.buckets.decode[0]].replay()
        assert state["seq_len"][1] > lasting["seq_len"][1], "the row that there is does its step"
        for name, tensor in state.items():
            assert torch.equal(tensor[0], lasting[name][0]), name


@each_drafter
def test_a_nan_request_harms_nobody(drafter: str) -> None:
    clean, model = TinyModel(), PoisonableModel()
    harmless = [p for p in ([i, i + 1] for i in range(40)) if POISON not in clean.generate(p, 20)]
    options: dict[str, Any] = {"max_batch": 2, "num_pages": 12, "max_seq_len": 24, "max_tokens": 24}
    with make_engine(model, speculate=drafters(model)[drafter], **options) as engine:
        neighbour = engine.submit(harmless[0], max_new_tokens=20)
        poisoned = engine.submit([1, POISON, 2], max_new_tokens=20)
        while not poisoned.finished:
            engine.step()
        assert poisoned.finish_reason is FinishReason.ERROR
        assert poisoned.token_ids == []
        assert any(bool(pool.isnan().any()) for pool in engine._runner.pools().values())
        heir = engine.submit(harmless[1], max_new_tokens=20)
        drain(engine)
        assert neighbour.token_ids == clean.generate(harmless[0], 20)
        assert heir.token_ids == clean.generate(harmless[1], 20)


def test_a_drafter_that_goes_nan_only_guesses_badly() -> None:
    """Its NaN stays in its own pages; target tokens and the rows beside it are unharmed."""
    target = TinyModel()
    texts = [[1, POISON, 2], [3, 4], [9, 8, 7]]
    with make_engine(target, max_tokens=24, speculate=drafters(target)["wrong"]) as engine:
        done = engine.generate(texts, max_new_tokens=15)
        assert any(bool(p.isnan().any()) for n, p in engine._runner.pools().items() if "draft" in n)
    assert [list(c.token_ids) for c in done] == [target.generate(p, 15) for p in texts]


@each_drafter
def test_a_larger_eager_step_after_capture_moves_no_memory_of_a_smaller_graph(drafter: str) -> None:
    model = TinyModel()
    with make_engine(model, max_tokens=40, speculate=drafters(model)[drafter]) as engine:
        before = engine.generate([[1, 2, 3]], max_new_tokens=9)[0].token_ids
        report = engine.verify(12)  # every bucket runs eagerly, the largest included
        assert report.ok, str(report)
        assert engine.generate([[1, 2, 3]], max_new_tokens=9)[0].token_ids == before


@each_drafter
def test_log_probabilities_are_those_without_drafts(drafter: str) -> None:
    """What the target put out is intact after the drafter has run."""
    model = TinyModel()
    texts = prompts(4, seed=3, longest=20)
    params = [SamplingParams(11, temperature=0.8 * (i % 2), seed=i) for i in range(4)]

    def served(speculate: Speculation | None) -> list[tuple[list[int], list[float]]]:
        with make_engine(model, max_tokens=32, speculate=speculate) as engine:
            requests = [engine.submit(p, q) for p, q in zip(texts, params, strict=True)]
            drain(engine)
            return [(r.token_ids, r.logprobs) for r in requests]

    for (ids, logs), (want_ids, want_logs) in zip(
        served(drafters(model)[drafter]), served(None), strict=True
    ):
        assert ids == want_ids
        assert logs == pytest.approx(want_logs, abs=1e-4)
