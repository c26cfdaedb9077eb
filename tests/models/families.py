"""Tiny random models of transformers' families."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCAB = 61
WINDOW = 7  # no multiple of a page

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 96,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    # Large enough that greedy tokens vary with the context.
    "initializer_range": 0.4,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

# name -> (model class, options beyond the sizes)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-rope3": (
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {"num_experts": 4, **_EXPERTS}),
    "mistral": ("MistralForCausalLM", {"sliding_window": WINDOW}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 3.0,  # scores of a random model are small
            "tie_word_embeddings": False,
            **_ALTERNATING,
        },
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            "query_pre_attn_scalar": 24,
            "num_hidden_layers": 3,
            "tie_word_embeddings": False,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            **_ALTERNATING,
        },
    ),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}),
    "phi3": ("Phi3ForCausalLM", {}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "granite": ("GraniteForCausalLM", {"attention_multiplier": 0.3, "logits_scaling": 2.0}),
    "cohere2": ("Cohere2ForCausalLM", _ALTERNATING),
    "glm4": ("Glm4ForCausalLM", {}),
    "starcoder2": ("Starcoder2ForCausalLM", {"sliding_window": WINDOW}),
    "gpt2": ("GPT2LMHeadModel", {}),
    "gpt-neox": ("GPTNeoXForCausalLM", {}),
}


def tiny(family: str, *, seed: int = 0, **options: Any) -> PreTrainedModel:
    """A random float32 model in eval mode; `options` go to its configuration."""
    name, defaults = FAMILIES[family]
    model_class = getattr(transformers, name)
    given = {k: x for k, x in (_SIZES | defaults | options).items() if x is not None}
    missing = {k: None for k in ("pad_token_id", "bos_token_id", "eos_token_id") if k not in given}
    return randomised(model_class, given | missing, seed=seed)


def randomised(
    model_class: type[PreTrainedModel], options: dict[str, Any], *, seed: int
) -> PreTrainedModel:
    """A seeded float32 model in eval mode from the options of its configuration."""
    torch.manual_seed(seed)
    model: PreTrainedModel = model_class(model_class.config_class(**options)).eval()
    _randomise(model)
    return model


@torch.no_grad()
def _randomise(model: PreTrainedModel) -> None:
    """Fill what initialises to zero or one, so that leaving it out would show."""
    for parameter in model.parameters():
        if parameter.dim() == 1 or parameter.std() == 0:
            parameter.add_(0.3 * torch.randn(parameter.shape))
