"""Sampling and drafts: a draft model, sampled rows, and what a request's tokens depend on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from graphattn import DCP, DraftModel, NGram, SamplingParams, UnsupportedModelError, VirtualGroup
from graphattn.errors import ConfigError, RequestError
from tests.runtime.lagging_stream import LaggingStream
from tests.runtime.serving import make_engine, prompts
from tests.runtime.tiny_model import TinyModel

TEXTS = prompts(7, seed=61, longest=30)
FIELDS: dict[str, Any] = {
    "temperature": 0.9,
    "top_k": 40,
    "top_p": 0.95,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.1,
}


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel(softcap=2.0, sinks=True, windows=(5, 0))


@pytest.fixture(scope="module")
def small() -> TinyModel:
    """A draft model of another shape, which is mostly wrong."""
    return TinyModel(num_q_heads=4, head_dim=4, windows=(3,), seed=5)


def params(i: int, count: int = 13) -> SamplingParams:
    """Greedy and sampled requests in turn."""
    return SamplingParams(count, seed=100 + i, **(FIELDS if i % 2 else {}))


def serve(model: TinyModel, **options: Any) -> list[tuple[int, ...]]:
    with make_engine(model, **options) as engine:
        requests = [engine.submit(p, params(i)) for i, p in enumerate(TEXTS)]
        while engine.busy:
            engine.step()
        return [tuple(r.token_ids) for r in requests]


@pytest.fixture(scope="module")
def plain(model: TinyModel) -> list[tuple[int, ...]]:
    tokens = serve(model)
    for i, text in enumerate(TEXTS):
        if not params(i).temperature:
            assert list(tokens[i]) == model.generate(text, 13)
    return tokens


@pytest.mark.parametrize(
    ("k", "backend"),
    [(k, "host") for k in range(1, 6)] + [(1, "eager"), (3, "eager"), (5, "eager")],
)
def test_a_draft_model_changes_no_token(
    model: TinyModel, small: TinyModel, plain: list[tuple[int, ...]], k: int, backend: str
) -> None:
    assert serve(model, speculate=DraftModel(small, k), backend=backend, max_tokens=32) == plain


@pytest.mark.parametrize(("W", "I", "reduce"), [(2, 1, "a2a"), (4, 16, "ag_rs"), (2, 3, "ag_rs")])
def test_nor_does_one_over_a_sharded_cache(
    model: TinyModel, small: TinyModel, plain: list[tuple[int, ...]], W: int, I: int, reduce: str
) -> None:
    dcp = DCP(VirtualGroup(W), I, reduce)  # type: ignore[arg-type]
    assert serve(model, dcp=dcp) == plain
    assert serve(model, dcp=dcp, speculate=DraftModel(small, 3)) == plain
    assert serve(model, dcp=dcp, speculate=NGram(4), max_tokens=24) == plain


@pytest.mark.parametrize("run_ahead", [1, 3])
def test_late_steps_change_no_token(
    model: TinyModel, small: TinyModel, plain: list[tuple[int, ...]], run_ahead: int
) -> None:
    options = {"run_ahead": run_ahead, "speculate": DraftModel(small, 2)}
    assert serve(model, stream=LaggingStream(pace=2), **options) == plain


def test_the_model_as_its_own_drafter_is_always_right(model: TinyModel) -> None:
    """Every draft of a greedy request is accepted, so metadata of each draft pass is right."""
    with make_engine(model, speculate=DraftModel(model, 3)) as engine:
        done = engine.generate(TEXTS[:4], max_new_tokens=17)
        stats = engine.stats()
    assert [list(c.token_ids) for c in done] == [model.generate(p, 17) for p in TEXTS[:4]]
    assert stats.tokens_drafted == stats.tokens_accepted > 0
    assert stats.drafted_by_place == stats.accepted_by_place


def test_drafts_beside_a_sharded_cache_are_right_too(model: TinyModel) -> None:
    dcp = DCP(VirtualGroup(4), 2, "a2a")
    with make_engine(model, speculate=DraftModel(model, 2), dcp=dcp) as engine:
        engine.generate(TEXTS[:4], max_new_tokens=17)
        stats = engine.stats()
    assert stats.tokens_drafted == stats.tokens_accepted > 0


@pytest.mark.parametrize("k", [1, 3])
def test_nothing_beyond_limits_with_a_draft_model(k: int) -> None:
    model = TinyModel(windows=(0,), max_seq_len=24)
    plain = model.generate([3] * 9, 100)
    with make_engine(model, speculate=DraftModel(model, k)) as engine:
        (whole,) = engine.generate([[3] * 9], max_new_tokens=100)
        (cut,) = engine.generate([[3] * 9], max_new_tokens=6)
        (stopped,) = engine.generate([[3] * 9], max_new_tokens=100, stop_token_ids=[plain[4]])
    assert list(whole.token_ids) == plain
    assert list(cut.token_ids) == plain[:6]
    assert list(stopped.token_ids) == plain[: plain.index(plain[4]) + 1]


def test_replay_verifies_and_audits_clean(model: TinyModel, small: TinyModel) -> None:
    dcp = DCP(VirtualGroup(2), 3)
    for options in ({"dcp": None}, {"dcp": dcp}):
        with make_engine(model, speculate=DraftModel(small, 2), **options) as engine:
            report = engine.verify(40)
            assert report.ok, str(report)
            assert engine.audit().findings == ()


def test_tokens_depend_on_seed_and_position_only(
    model: TinyModel, plain: list[tuple[int, ...]]
) -> None:
    """Alone, in another order, in other buckets: the same seed, the same tokens."""
    with make_engine(model, max_batch=2, max_tokens=8) as engine:
        for i in reversed(range(len(TEXTS))):
            (done,) = engine.generate([TEXTS[i]], params(i))
            assert done.token_ids == plain[i]


def test_other_seeds_give_other_tokens_and_random_ones_differ(model: TinyModel) -> None:
    with make_engine(model) as engine:
        seeded = [
            engine.generate([[1, 2]], SamplingParams(12, temperature=1.5, seed=s))[0].token_ids
            for s in (1, 2, 1)
        ]
        free = engine.generate([[1, 2]] * 4, max_new_tokens=12, temperature=1.5)
    assert seeded[0] == seeded[2] != seeded[1]
    assert len({c.token_ids for c in free}) == 4


@torch.no_grad()
def test_sampled_tokens_follow_the_distribution(model: TinyModel) -> None:
    """Chi-square of first tokens over many seeds against the model's own softmax, drafts on."""
    prompt, draws = [5, 9, 2], 1500
    probability = (model.dense_logits(prompt)[-1] / 1.5).softmax(-1).double()
    with make_engine(model, max_batch=16, max_tokens=96, speculate=NGram(2)) as engine:
        requests = []
        for first in range(0, draws, 500):  # the queue is bounded
            requests += [
                engine.submit(prompt, SamplingParams(1, temperature=1.5, seed=seed))
                for seed in range(first, first + 500)
            ]
            while engine.busy:
                engine.step()
                engine.poll()
    counts = Counter(r.token_ids[0] for r in requests)
    likely = [t for t in range(61) if probability[t] * draws >= 5]
    rest = draws - sum(counts[t] for t in likely)
    expected = [float(probability[t]) * draws for t in likely]
    expected.append(draws - sum(expected))
    observed = [counts[t] for t in likely] + [rest]
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True) if e > 0)
    freedom = len(observed) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


@torch.no_grad()
def test_log_probabilities_are_the_models(model: TinyModel) -> None:
    with make_engine(model, speculate=DraftModel(model, 2)) as engine:
        for fields in ({}, {"temperature": 1.2, "seed": 3}):
            (done,) = engine.generate([[5, 9, 2]], max_new_tokens=11, **fields)
            logits = model.dense_logits([5, 9, 2, *done.token_ids])
            for i, (token, got) in enumerate(zip(done.token_ids, done.logprobs, strict=True)):
                want = float(logits[2 + i].log_softmax(-1)[token])
                assert abs(got - want) < 1e-4


def test_repetition_penalty_keeps_tokens_apart(model: TinyModel) -> None:
    """A huge penalty on emitted tokens: no token appears twice, with drafts and without."""
    for speculate in (None, NGram(3), DraftModel(model, 3)):
        with make_engine(model, speculate=speculate) as engine:
            (done,) = engine.generate([[1, 2, 3]], max_new_tokens=30, presence_penalty=1e4)
            assert len(set(done.token_ids)) == 30


def test_greedy_and_sampled_rows_share_a_graph_without_touching_each_other(
    model: TinyModel, plain: list[tuple[int, ...]]
) -> None:
    with make_engine(model) as engine:
        greedy = [engine.submit(TEXTS[i], params(i)) for i in range(0, 6, 2)]
        hot = engine.submit([9, 9, 9], SamplingParams(40, temperature=5.0, seed=1))
        while engine.busy:
            engine.step()
    assert [tuple(r.token_ids) for r in greedy] == [plain[i] for i in range(0, 6, 2)]
    assert len(hot.token_ids) == 40


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", 10**400),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("inf")),
        ("frequency_penalty", "much"),
        ("seed", -1),
        ("seed", 1 << 64),
    ],
)
def test_bad_sampling_fields_are_named(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{field}: wanted"):
        SamplingParams(**{field: value})


def test_bad_speculation_is_named(model: TinyModel) -> None:
    with pytest.raises(ConfigError, match=r"k: wanted an integer in 1\.\.15"):
        NGram(0)
    with pytest.raises(ConfigError, match="min_match"):
        NGram(2, min_match=3, max_match=1)
    with pytest.raises(ConfigError, match=r"speculate: wanted graphattn\.NGram"):
        make_engine(model, speculate=3)
    with pytest.raises(UnsupportedModelError, match="vocabulary of 61, got 30"):
        make_engine(model, speculate=DraftModel(TinyModel(vocab_size=30), 2))
    with pytest.raises(ConfigError, match=r"max_seq_len: wanted at most the draft model's 32"):
        make_engine(model, speculate=DraftModel(TinyModel(max_seq_len=32), 2))


class OfferingModel(TinyModel):
    """Offers its embeddings to a drafter, place by place."""

    def forward(self, step: Any) -> torch.Tensor:
        logits = super().forward(step)
        step.features["embedding"] = self.embed(step.input_ids)
        return logits


class FeatureDrafter:
    """A drafter of the test: it drafts from what the model offered."""

    k = 1

    def resolve(self, target: Any) -> FeatureDrafter:
        return self

    lookahead = 0

    def kv_layers(self) -> tuple[()]:
        return ()

    def open(self, memory: Any, target: Any) -> FeatureDrafter:
        self.state, self.seen = memory.state, torch.zeros(())
        self.sizes: list[int] = []
        return self

    def program(self, bucket: Any) -> FeatureDrafter:
        self.sizes.append(bucket.tokens)
        return self

    def remember(self) -> None:
        """Nothing is needed from before the commit."""

    def run(self, features: Any) -> None:
        assert features["embedding"].shape[0] in self.sizes
        self.seen.copy_(features["embedding"].abs().sum())
        self.state.draft_tokens.fill_(7)
        self.state.draft_count.fill_(1)

    def pools(self) -> dict[str, torch.Tensor]:
        return {}

    def scratch(self) -> dict[str, torch.Tensor]:
        return {}

    def lasting(self) -> dict[str, torch.Tensor]:
        return {}

    def models(self) -> dict[str, object]:
        return {}


def test_a_drafter_of_ones_own_gets_what_the_model_offers() -> None:
    model, drafter = OfferingModel(), FeatureDrafter()
    with make_engine(model, speculate=drafter) as engine:
        (done,) = engine.generate([[1, 2, 3]], max_new_tokens=12)
        stats = engine.stats()
    assert list(done.token_ids) == model.generate([1, 2, 3], 12)
    assert float(drafter.seen) > 0, "the features were not those of a replay"
    assert stats.tokens_drafted > 0
