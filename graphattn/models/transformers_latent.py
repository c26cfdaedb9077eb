"""Latent attention (MLA) of transformers' DeepSeek families, over the latents themselves.

Their modules compress a token to one latent for all heads: c [kv_lora_rank], normed, and
r [qk_rope_head_dim], rotated. `expand_kv` makes keys and values of every head h of it, through the
two halves of kv_b_proj:

    k_h = (W_UK_h c, r)        v_h = W_UV_h c

In our tree `expand_kv` hands on the latent as it is, and both products go to the other side of the
attention, where they are done once per query instead of once per key:

    q_h . k_h = (W_UK_h^T q_nope_h, q_rope_h) . (c, r)        sum_j p_j v_hj = W_UV_h sum_j p_j c_j

All else is the module's own: the query with or without its low-rank half, norms, the layout of the
rotation, the scale with YaRN's factor, the output projection.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from graphattn.models.transformers_checks import unsupported


def use_latents(tree: nn.Module) -> None:
    """Let every latent attention of a tree of ours hand its latents to the attention function."""
    for module in _expanding(tree):
        module.expand_kv = _hand_on


def is_latent(module: nn.Module) -> bool:
    """Whether `use_latents` was here: keys [1, T, D] and values [1, T, Dv] are latents."""
    return getattr(module, "expand_kv", None) is _hand_on


def absorbed(module: Any, q: Tensor) -> Tensor:
    """q [T, H, nope + rope] in the space of the latents: [T, H, kv_lora_rank + rope]."""
    nope: int = module.qk_nope_head_dim
    up = up_projections(module, q.shape[1])[:, :nope]
    c = torch.bmm(q[..., :nope].transpose(0, 1), up).transpose(0, 1)
    return torch.cat([c, q[..., nope:]], dim=-1)


def expanded(module: Any, out: Tensor) -> Tensor:
    """Averages of latents [T, H, kv_lora_rank] as those of values: [T, H, v_head_dim]."""
    up = up_projections(module, out.shape[1])[:, module.qk_nope_head_dim :]
    return torch.bmm(out.transpose(0, 1), up.transpose(1, 2)).transpose(0, 1)


def check_latents(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModelError` for latent attention with other parts than DeepSeek's."""
    modules = _expanding(model)
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "kv_lora_rank", None) and not modules:
        raise unsupported(model, "latent attention (MLA) that does not expand its KV in expand_kv")
    for module in modules:
        name = type(module).__name__
        if hasattr(module, "indexer"):
            raise unsupported(model, f"{name} picks the positions to attend to (sparse attention)")
        up = module.kv_b_proj
        shape = (module.num_heads * _expanded_dim(module), module.kv_lora_rank)
        if tuple(up.weight.shape) != shape or up.bias is not None:
            raise unsupported(
                model,
                f"{name}: kv_b_proj is no plain product of shape {shape}, keys and values of each "
                "head from a latent",
            )


def latent_note(tree: nn.Module) -> str | None:
    """What the swap means for the cache, in a sentence."""
    modules = _expanding(tree)
    if not modules:
        return None
    first = modules[0]
    rope = first.qk_rope_head_dim
    return (
        f"latent attention: {len(modules)} layers, {first.kv_lora_rank + rope} values per token "
        f"and layer instead of {first.num_heads * (_expanded_dim(first) + rope)}"
    )


def _hand_on(c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """In place of expand_kv: the latent [1, 1, T, D] for the keys, its c part for the values."""
    return torch.cat([c, r], dim=-1), c


def up_projections(module: Any, heads: int) -> Tensor:
    """W_UK and W_UV of each head, a view of kv_b_proj: [H, nope + v, kv_lora_rank]."""
    weight: Tensor = module.kv_b_proj.weight
    return weight.view(heads, -1, weight.shape[1])


def _expanded_dim(module: Any) -> int:
    """Values that a head's key and value have of the latent's c part."""
    nope: int = module.qk_nope_head_dim
    v: int = module.v_head_dim
    return nope + v


def _expanding(tree: nn.Module) -> list[Any]:
    return [module for module in tree.modules() if hasattr(module, "expand_kv")]
