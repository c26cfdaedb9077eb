"""What the adapter cannot serve is refused before anything is captured, with what is missing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from graphattn.errors import UnsupportedModelError
from graphattn.models.transformers import adapt
from tests.models.families import tiny


def _dynamic_rope() -> PreTrainedModel:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    return tiny("llama", rope_parameters=rope)


def _longrope() -> PreTrainedModel:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 32,
    }
    return tiny("llama", rope_parameters=rope)


def _encoder_decoder() -> PreTrainedModel:
    config = transformers.T5Config(
        vocab_size=61, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2
    )
    return transformers.T5ForConditionalGeneration(config)


def _chunked_mask() -> PreTrainedModel:
    config = transformers.Llama4TextConfig(
        vocab_size=61, hidden_size=32, intermediate_size=32, intermediate_size_mlp=32,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        num_local_experts=2, attention_chunk_size=8, layer_types=["chunked_attention"],
        pad_token_id=0, moe_layers=[],
    )  # fmt: skip
    return transformers.Llama4ForCausalLM(config)


def _bidirectional() -> PreTrainedModel:
    model = tiny("llama")
    model.config.is_causal = False
    return model


def _alibi() -> PreTrainedModel:
    config = transformers.BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=2)
    return transformers.BloomForCausalLM(config)


def _shared_kv() -> PreTrainedModel:
    model = tiny("llama")
    model.config.num_kv_shared_layers = 1
    return model


def _int8_weight() -> PreTrainedModel:
    model = tiny("llama")
    weight = nn.Parameter(torch.zeros(64, 48, dtype=torch.int8), requires_grad=False)
    model.model.layers[1].mlp.up_proj.weight = weight
    return model


def _on_no_device() -> PreTrainedModel:
    return tiny("llama").to("meta")


def _short_of_a_layer() -> PreTrainedModel:
    model = tiny("llama")
    model.model.layers[1].self_attn.layer_idx = 0
    return model


def _wrong_window() -> PreTrainedModel:
    model = tiny("gemma2")
    model.model.layers[0].self_attn.sliding_window = 5
    return model


def _failing_forward() -> PreTrainedModel:
    model = tiny("llama")
    model.model.layers[0].mlp.down_proj = nn.Linear(3, 5)
    return model


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: nn.Linear(2, 2), "Linear cannot be served: it is no PreTrainedModel"),
    (lambda: tiny("llama").model, "LlamaModel.*no language-model head"),
    (_encoder_decoder, "encoder-decoder models need cross-attention"),
    (_dynamic_rope, "rope type 'dynamic'"),
    (_longrope, "rope type 'longrope'"),
    (_chunked_mask, "neither causal nor a causal sliding window"),
    (_bidirectional, "neither causal nor a causal sliding window"),
    (_alibi, "BloomForCausalLM"),
    (_shared_kv, "share the KV of other layers"),
    (_int8_weight, r"quantised weights \(model.layers.1.mlp.up_proj.weight is torch.int8\)"),
    (_on_no_device, "these lie on meta"),
    (_short_of_a_layer, "1 called the attention function, 2 times in all"),
    (_wrong_window, "layer 0 asks for window 5 under a mask of 7"),
    (_failing_forward, "its forward failed on two tokens: RuntimeError"),
]


@pytest.mark.parametrize(
    ("build", "message"), REFUSED, ids=[b.__name__.strip("_<>") for b, _ in REFUSED]
)
def test_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        adapt(build())
