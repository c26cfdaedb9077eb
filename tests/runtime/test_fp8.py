"""FP8 pages: an engine's tokens are those of attention over exactly quantised K and V."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from graphattn import DCP, MTP, DraftModel, NGram, UnsupportedModelError, VirtualGroup
from graphattn.errors import ConfigError
from graphattn.models.contract import AttentionLayer
from tests.runtime.serving import make_engine, prompts
from tests.runtime.tiny_latent import TinyLatent
from tests.runtime.tiny_model import TinyModel
from tests.runtime.tiny_mtp import KnowingMTP, TinyTarget, windowful

FP8 = torch.float8_e4m3fn
TEXTS = prompts(5, seed=5, longest=30)
NEW = 8


def held(values: Tensor, scale: Tensor) -> Tensor:
    """What pages give back of `values`; that torch's cast is exact is tested with the kernels."""
    return (values / scale).clamp(-448, 448).to(FP8).float() * scale


def quantised_as(spec: AttentionLayer, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    assert spec.k_scale is not None
    assert spec.v_scale is not None
    return held(k, spec.k_scale[:, None]), held(v, spec.v_scale[:, None])


class Naive(TinyModel):
    """Runs naively over what pages would give back; an engine gets K and V as they are."""

    naive = False

    def dense_logits(self, token_ids: list[int]) -> Tensor:
        self.naive = True
        try:
            return super().dense_logits(token_ids)
        finally:
            self.naive = False


class ScaledModel(Naive):
    """K with a scale by head and V with one, and the other way round.

    With scales this large values become small multiples of 2**-9, so that rounding is coarse enough
    to be seen in the tokens.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.position.weight.mul_(0.3)  # so that tokens depend on tokens,
        for out in self.out:
            out.weight.mul_(2.0)  # and on attention
        scales = torch.linspace(400.0, 900.0, self.heads[1]), torch.tensor([600.0])
        self.attention_layers = tuple(
            replace(layer, k_scale=scales[i % 2], v_scale=scales[1 - i % 2])
            for i, layer in enumerate(self.attention_layers)
        )

    def _split(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super()._split(layer, x)
        return (q, *quantised_as(self.attention_layers[layer], k, v)) if self.naive else (q, k, v)


class ScaledTarget(ScaledModel, TinyTarget):
    """One that offers its hidden states."""


class ScaledLatent(Naive, TinyLatent):
    """Latent layers, whose values and rope keys have scales of their own."""

    def __init__(self) -> None:
        super().__init__(windows=(0, 5), latent=(0, 1))
        self.position.weight.mul_(0.3)
        for back in self.back:
            back.weight.mul_(4.0)
        scale = torch.tensor([150.0, 250.0])
        self.attention_layers = tuple(
            replace(layer, latent_scale=scale) for layer in self.attention_layers
        )

    def queries(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        q, latent = super().queries(layer, x)
        spec = self.attention_layers[layer]
        if self.naive and spec.latent_scale is not None:
            sizes = torch.tensor([spec.value_dim, spec.head_dim - spec.value_dim])
            latent = held(latent, spec.latent_scale.repeat_interleave(sizes))
        return q, latent


MODELS: dict[str, Callable[[], TinyModel]] = {
    "gqa": lambda: ScaledModel(softcap=2.0, sinks=True, windows=(5, 0)),
    "latent": ScaledLatent,
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> TinyModel:
    return MODELS[request.param]()


@pytest.fixture(scope="module")
def naive(model: TinyModel) -> list[list[int]]:
    return [model.generate(text, NEW) for text in TEXTS]


def tokens(model: object, texts: list[list[int]] = TEXTS, **options: Any) -> list[list[int]]:
    with make_engine(model, **({"kv_dtype": FP8} | options)) as engine:
        done = engine.generate(texts, max_new_tokens=NEW)
        return [list(completion.token_ids) for completion in done]


OPTIONS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "three ranks, messages": {"dcp": DCP(VirtualGroup(3), 2, "a2a")},
    "drafts of the context": {"speculate": NGram(3)},
    "preempted": {"num_pages": 24},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_tokens_are_those_of_quantised_attention(
    model: TinyModel, naive: list[list[int]], options: dict[str, Any]
) -> None:
    assert tokens(model, **options) == naive


def test_rounding_is_seen(model: TinyModel, naive: list[list[int]]) -> None:
    """Else the tests above would prove nothing; and scales are of FP8 pages alone."""
    exact = tokens(model, kv_dtype=None)
    assert exact != naive
    unscaled = MODELS["latent" if isinstance(model, TinyLatent) else "gqa"]()
    unscaled.attention_layers = tuple(
        replace(x, k_scale=None, v_scale=None, latent_scale=None) for x in unscaled.attention_layers
    )
    assert tokens(unscaled, kv_dtype=torch.float32) == exact


def test_a_draft_model_with_fp8_pages_changes_no_token(
    model: TinyModel, naive: list[list[int]]
) -> None:
    """Over two ranks; its pages hold FP8 too, as the budget counts them."""
    small = TinyModel(num_q_heads=4, head_dim=4, windows=(3,), seed=5)
    options: dict[str, Any] = {"speculate": DraftModel(small, 2), "dcp": DCP(VirtualGroup(2), 2)}
    with make_engine(model, kv_dtype=FP8, max_tokens=24, **options) as engine:
        done = engine.generate(TEXTS, max_new_tokens=NEW)
        assert {pool.dtype for pool in engine._runner.pools().values()} == {FP8}
    assert [list(completion.token_ids) for completion in done] == naive


@pytest.mark.parametrize("ranks", [1, 2])
def test_mtp_over_fp8_pages(ranks: int) -> None:
    """The module does the target's work over pages of its own: were they read or scaled otherwise,
    its drafts would be wrong."""
    target = ScaledTarget()
    texts = windowful(3, seed=8, longest=30)
    options: dict[str, Any] = {"dcp": DCP(VirtualGroup(2), 1)} if ranks == 2 else {}
    options |= {"speculate": MTP(2, module=KnowingMTP(target, 2)), "max_tokens": 24}
    with make_engine(target, kv_dtype=FP8, **options) as engine:
        done = engine.generate(texts, max_new_tokens=NEW)
        stats = engine.stats()
        assert {pool.dtype for pool in engine._runner.pools().values()} == {FP8}
    assert [list(x.token_ids) for x in done] == [target.generate(text, NEW) for text in texts]
    assert stats.tokens_accepted > 0.8 * stats.tokens_drafted > 0


def test_prefixes_are_shared(model: TinyModel) -> None:
    texts = [TEXTS[0] + [1, 2, 3, 4, 5, 6, 7, 8, 9], TEXTS[0] + [1, 2, 3, 4, 5, 6, 7, 8, 10, 11]]
    with make_engine(model, kv_dtype=FP8, max_batch=1) as engine:
        done = engine.generate(texts, max_new_tokens=NEW)
        assert engine.stats().prompt_tokens_reused >= 8
    assert [list(x.token_ids) for x in done] == [model.generate(text, NEW) for text in texts]


def test_a_step_replays_as_it_runs_eagerly_and_audits_clean(model: TinyModel) -> None:
    with make_engine(model, kv_dtype=FP8, dcp=DCP(VirtualGroup(2), 1)) as engine:
        report = engine.verify(5, seed=3)
        assert report.ok, str(report)
        audit = engine.audit()
        assert audit.findings == ()


def test_a_budget_holds_twice_the_tokens_of_bf16() -> None:
    """In the report: pages, and bytes of a token."""
    model = ScaledModel(max_seq_len=2048).bfloat16()
    budget = 64 * 1024
    reports = []
    for kv_dtype in (None, FP8):
        options = {"memory_budget": budget, "backend": "eager", "max_batch": 3, "page_size": 16}
        with make_engine(model, kv_dtype=kv_dtype, **options) as engine:
            reports.append(engine.report())
    wide, narrow = reports
    assert (wide.kv_dtype, narrow.kv_dtype) == ("bfloat16", "float8_e4m3fn")
    assert wide.kv_bytes_per_token == 2 * narrow.kv_bytes_per_token == 2 * 2 * 2 * 8 * 2
    assert narrow.num_pages == 2 * wide.num_pages
    assert narrow.kv_bytes == wide.kv_bytes <= budget
    assert f"{narrow.num_pages} pages of 16 in float8_e4m3fn" in str(narrow)


def test_the_workspace_stays_in_the_model_dtype() -> None:
    with make_engine(ScaledModel().bfloat16(), kv_dtype=FP8, backend="eager") as engine:
        shard = engine._runner.memory.target.shards[0]
        assert shard.workspace.out.dtype == torch.bfloat16
        assert shard.pools.keys[0].dtype == FP8


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.float8_e5m2, "fp8"])
def test_other_dtypes_of_pages_are_refused(kv_dtype: object) -> None:
    with pytest.raises(
        ConfigError, match=r"^kv_dtype: wanted torch\.float8_e4m3fn, or the model's"
    ):
        make_engine(TinyModel(), kv_dtype=kv_dtype)


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"k_scale": torch.ones(3)}, r"layer 1: k_scale of torch\.float32 \[3\]; wanted \[1\] or"),
        ({"v_scale": torch.ones(2).double()}, r"layer 1: v_scale of torch\.float64 \[2\]"),
        ({"latent_scale": torch.ones(2)}, r"layer 1: latent_scale .*; wanted None of"),
    ],
)
def test_a_wrong_scale_of_a_layer_is_named(scales: dict[str, Tensor], message: str) -> None:
    model = TinyModel()
    first, second = model.attention_layers
    model.attention_layers = (first, replace(second, **scales))
    with pytest.raises(UnsupportedModelError, match=message):
        make_engine(model, kv_dtype=FP8)
