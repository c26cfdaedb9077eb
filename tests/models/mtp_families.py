"""Tiny random models of transformers with prediction modules: KV of many heads, and latents."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from tests.models.families import VOCAB, randomised
from tests.models.latent_families import LATENT_FAMILIES

_GLM: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 96,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "initializer_range": 0.4,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4-moe": ("Glm4MoeForCausalLM", _GLM),
    "deepseek-v3": LATENT_FAMILIES["deepseek-v3"],
    "deepseek-v3-yarn": LATENT_FAMILIES["deepseek-v3-yarn"],
}


@cache
def with_mtp(family: str, depth: int) -> tuple[PreTrainedModel, MtpModel]:
    """A random model in eval mode and its modules, which share its embedding and head."""
    name, options = _FAMILIES[family]
    given = options | {"num_nextn_predict_layers": depth}
    model = randomised(getattr(transformers, name), given, seed=0)
    model.set_experts_implementation("batched_mm")  # its audit needs no driver
    torch.manual_seed(1)
    mtp = MtpModel(model, depth).eval()
    with torch.no_grad():
        for parameter in mtp.layers.parameters():
            if parameter.dim() == 1 or parameter.std() == 0:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model, mtp
