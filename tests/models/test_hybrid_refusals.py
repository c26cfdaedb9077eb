"""Models that keep recurrent state are refused, with the hint at what serves such models."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from graphattn.errors import UnsupportedModelError
from graphattn.models.transformers import adapt

SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2}
ATTENTION: dict[str, Any] = SIZES | {
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
MAMBA = {"state_size": 4, "time_step_rank": 4}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}

# family -> (options of its configuration, what the refusal names)
HYBRIDS: dict[str, tuple[dict[str, Any], str]] = {
    "Mamba": (SIZES | MAMBA, "linear_attention"),
    "Mamba2": (SIZES | {"state_size": 4, "num_heads": 4, "head_dim": 16}, "linear_attention"),
    "FalconMamba": (SIZES | MAMBA, "linear_attention"),
    "Rwkv": (SIZES | {"attention_hidden_size": 32}, "beside its KV"),
    "xLSTM": (SIZES | {"num_heads": 2}, "beside its KV"),
    "Bamba": (ATTENTION | MAMBA2 | {"attn_layer_indices": [1]}, "linear_attention"),
    # its attention and state-space layers run side by side: all of them call our attention
    "FalconH1": (ATTENTION | MAMBA2 | {"mamba_d_ssm": 64}, "hybrid"),
    "Zamba2": (
        ATTENTION | {"n_mamba_heads": 4, "layers_block_type": ["mamba", "hybrid"]},
        "hybrid, linear_attention",
    ),
    "Jamba": (
        ATTENTION | {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
        "linear_attention",
    ),
    "GraniteMoeHybrid": (ATTENTION | MAMBA2 | EXPERTS | LINEAR, "linear_attention"),
    "Qwen3Next": (
        ATTENTION | LINEAR | {"num_experts": 2, "num_experts_per_tok": 1},
        "linear_attention",
    ),
    "MiniMax": (ATTENTION | LINEAR | EXPERTS, "linear_attention"),
    "RecurrentGemma": (
        ATTENTION | {"lru_width": 32, "block_types": ["recurrent", "attention"]},
        "linear_attention",
    ),
    "Lfm2": (ATTENTION | {"layer_types": ["conv", "full_attention"]}, "conv"),
}


@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrids_are_refused(family: str) -> None:
    """FalconH1 looks like a model of attention layers only, from outside, and was once served
    with its state-space layers running over the tokens of all requests."""
    options, names = HYBRIDS[family]
    config = getattr(transformers, f"{family}Config")(**options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with pytest.raises(UnsupportedModelError, match=f"{names}.*slot_tensors, see docs/own-model"):
        adapt(model)
