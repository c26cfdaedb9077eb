"""FP8 pages: an engine's tokens are those of attention over exactly quantised K and V."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import graphattn
from graphattn import DCP, MTP, DraftModel, NGram, UnsupportedModelError, VirtualGroup
from graphattn.errors import ConfigError
from graphattn.kernels.fp8_ref import dequantise_ref, quantise_ref
from tests.runtime.serving import make_engine, prompts
from tests.runtime.tiny_latent import TinyLatent
from tests.runtime.tiny_model import TinyModel

FP8 = torch.float8_e4m3fn
TEXTS = prompts(6, seed=5, longest=30)
NEW = 9


def held(values: Tensor, scale: Tensor | None) -> Tensor:
    """What the pages give back of `values`."""
    scale = torch.ones(1) if scale is None else scale
    return dequantise_ref(quantise_ref(values, scale), scale).float()


class QuantisedModel(TinyModel):
    """Its naive run goes through the format's oracle; the engine gets K and V as they are."""

    _naive = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        hkv = self.heads[1]
        scales = torch.linspace(0.006, 0.02, hkv), torch.tensor([0.013])
        self.attention_layers = tuple(
            replace(layer, k_scale=scales[i % 2], v_scale=scales[1 - i % 2])
            for i, layer in enumerate(self.attention_layers)
        )

    def _split(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super()._split(layer, x)
        if self._naive:
            spec = self.attention_layers[layer]
            assert spec.k_scale is not None
            assert spec.v_scale is not None
            k, v = held(k, spec.k_scale[:, None]), held(v, spec.v_scale[:, None])
        return q, k, v

    def dense_logits(self, token_ids: list[int]) -> Tensor:
        self._naive = True
        try:
            return super().dense_logits(token_ids)
        finally:
            self._naive = False


class QuantisedLatent(TinyLatent):
    """The same with latent layers, whose values and rope keys have scales of their own."""

    _naive = False

    def __init__(self) -> None:
        super().__init__(windows=(0, 5), latent=(0, 1))
        scale = torch.tensor([0.005, 0.011])
        self.attention_layers = tuple(
            replace(layer, latent_scale=scale) for layer in self.attention_layers
        )

    def queries(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        q, latent = super().queries(layer, x)
        if self._naive:
            spec = self.attention_layers[layer]
            assert spec.latent_scale is not None
            sizes = torch.tensor([spec.value_dim, spec.head_dim - spec.value_dim])
            latent = held(latent, spec.latent_scale.repeat_interleave(sizes))
        return q, latent

    def dense_logits(self, token_ids: list[int]) -> Tensor:
        self._naive = True
        try:
            return super().dense_logits(token_ids)
        finally:
            self._naive = False


MODELS: dict[str, Callable[[], TinyModel]] = {
    "gqa": lambda: QuantisedModel(softcap=2.0, sinks=True, windows=(5, 0)),
    "latent": QuantisedLatent,
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> TinyModel:
    return MODELS[request.param]()


@pytest.fixture(scope="module")
def naive(model: TinyModel) -> list[list[int]]:
    return [model.generate(text, NEW) for text in TEXTS]


def tokens(model: TinyModel, **options: Any) -> list[list[int]]:
    with make_engine(model, **({"kv_dtype": FP8} | options)) as engine:
        done = engine.generate(TEXTS, max_new_tokens=NEW)
        return [list(completion.token_ids) for completion in done]


OPTIONS: dict[str, dict[str, Any]] = {
    "host": {},
    "eager": {"backend": "eager"},
    "two ranks": {"dcp": DCP(VirtualGroup(2), 1)},
    "three ranks, messages": {"dcp": DCP(VirtualGroup(3), 2, "a2a")},
    "drafts of the context": {"speculate": NGram(3)},
    "preempted": {"num_pages": 24},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_tokens_are_those_of_quantised_attention(
    model: TinyModel, naive: list[list[int]], options: dict[str, Any]
) -> None:
    assert tokens(model, **options) == naive
