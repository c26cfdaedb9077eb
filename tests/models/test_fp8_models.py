"""FP8 pages under transformers models: scales of checkpoints, and the trained miniature."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import graphattn
from graphattn import DCP, MTP, NGram, VirtualGroup
from graphattn.models.transformers import adapt
from profiles.miniature.model import load
from profiles.miniature.text import held_out_prompts
from tests.runtime.serving import make_engine
from tests.tiny_llama import tiny_llama

FP8 = torch.float8_e4m3fn
PROMPTS, TOKENS = held_out_prompts(3, 40), 20


def test_scales_of_a_checkpoint_are_taken() -> None:
    """As quantised checkpoints have them: a scalar or a tensor on each attention module."""
    model = tiny_llama()
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.k_scale = nn.Parameter(torch.tensor(0.25 + i, dtype=torch.bfloat16))
        layer.self_attn.v_scale = nn.Parameter(torch.full((1, 1, 1), 0.5))
    layers = adapt(model).attention_layers
    assert [(x.k_scale.tolist(), x.v_scale.tolist()) for x in layers] == [
        ([0.25], [0.5]),
        ([1.25], [0.5]),
    ]
    assert adapt(tiny_llama()).attention_layers[0].k_scale is None


@pytest.fixture(scope="module")
def miniature() -> Any:
    return graphattn.calibrate_kv(load(), PROMPTS)


def tokens(model: Any, **options: Any) -> list[tuple[int, ...]]:
    given = {"max_batch": 3, "max_tokens": 64, "max_seq_len": 96, "page_size": 16, "kv_dtype": FP8}
    with make_engine(model, **(given | options)) as engine:
        done = engine.generate(PROMPTS, max_new_tokens=TOKENS)
        return [completion.token_ids for completion in done]


@pytest.fixture(scope="module")
def plain(miniature: Any) -> list[tuple[int, ...]]:
    return tokens(miniature, backend="eager")


OPTIONS: dict[str, dict[str, Any]] = {
    "replayed": {},
    "its own module drafts": {"speculate": MTP(1)},
    "drafts over two ranks": {"speculate": NGram(3), "dcp": DCP(VirtualGroup(2), 3)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_tokens_of_the_miniature_are_the_same(
    miniature: Any, plain: list[tuple[int, ...]], options: dict[str, Any]
) -> None:
    assert tokens(miniature, **options) == plain
