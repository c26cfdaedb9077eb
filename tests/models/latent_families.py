"""Tiny random models of transformers' families with latent attention (MLA)."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PreTrainedModel

from tests.models.families import VOCAB, randomised

_ATTENTION: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 20,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "max_position_embeddings": 96,
    "initializer_range": 0.4,  # large enough that greedy tokens vary with the context
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_EXPERTS: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 16,
    "routed_scaling_factor": 1.3,
    "n_group": 3,
    "topk_group": 2,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 24,
}
_V3 = {**_ATTENTION, **_EXPERTS, "num_nextn_predict_layers": 0}

# name -> (model class, configuration)
LATENT_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v3": ("DeepseekV3ForCausalLM", _V3),
    "deepseek-v3-yarn": (
        "DeepseekV3ForCausalLM",
        {**_V3, "q_lora_rank": None, "rope_parameters": YARN, "attention_bias": True},
    ),
    "deepseek-v3-halves": (
        "DeepseekV3ForCausalLM",
        {**_V3, "rope_interleave": False, "num_attention_heads": 5, "num_key_value_heads": 5},
    ),
    "deepseek-v2": (
        "DeepseekV2ForCausalLM",
        {**_ATTENTION, **_EXPERTS, "topk_method": "group_limited_greedy"},
    ),
    "deepseek-v2-lite": (
        "DeepseekV2ForCausalLM",
        {
            **_ATTENTION,
            **_EXPERTS,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": YARN,
        },
    ),
    "glm4-moe-lite": ("Glm4MoeLiteForCausalLM", _V3),
    "youtu": ("YoutuForCausalLM", _ATTENTION),
    "axk1": ("AXK1ForCausalLM", {**_ATTENTION, **_EXPERTS}),
    "minicpm3": ("MiniCPM3ForCausalLM", _ATTENTION),
    "mistral4": (
        "Mistral4ForCausalLM",
        {**_ATTENTION, **_EXPERTS, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}},
    ),
}
# name -> what cannot be served of what else has latents
UNSUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v32": ("DeepseekV32ForCausalLM", _V3),
    "longcat": (
        "LongcatFlashForCausalLM",
        {
            **_ATTENTION,
            "num_layers": 2,  # of two attentions each
            "num_hidden_layers": 4,
            "head_dim": 8,
            "qk_head_dim": 18,
            "ffn_hidden_size": 32,
            "expert_ffn_hidden_size": 16,
            "moe_topk": 2,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
        },
    ),
}


def tiny_latent(family: str, *, seed: int = 0, **options: Any) -> PreTrainedModel:
    """A random float32 model in eval mode; `options` go to its configuration."""
    name, defaults = (LATENT_FAMILIES | UNSUPPORTED)[family]
    model_class = getattr(transformers, name)
    model = randomised(model_class, defaults | options, seed=seed)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.1)
    return model
