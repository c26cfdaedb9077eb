"""Latent attention (MLA): projections of the hidden state in one product; norms, rotation of keys
and write in one operation; W_UK and the rotation of queries in another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from graphattn.models.contract import LowRank, Rotation
from graphattn.models.fusion.joined import Joined
from graphattn.models.fusion.matching import Inputs, UnfusedError, check_own, has, linears
from graphattn.models.fusion.norms import Formula, formula_of
from graphattn.models.fusion.rehearsal import Rehearsal, check_unchanged, nearest, scalars
from graphattn.models.fusion.rotations import LAYOUTS, Layout
from graphattn.models.transformers_calls import FusedCaller
from graphattn.models.transformers_latent import is_latent, up_projections


class LatentAttention:
    """In place of a latent attention's forward."""

    def __init__(self, module: Any, joined: Joined, layout: Layout, formula: Formula) -> None:
        self.joined = joined
        self._module, self._layout, self._formula = module, layout, formula
        self._scalars = scalars(module)

    @property
    def bypassed(self) -> tuple[nn.Module, ...]:
        """Norms that are done along the way."""
        module = self._module
        lora = module.q_lora_rank is not None
        return (module.kv_a_layernorm, *((module.q_a_layernorm,) if lora else ()))

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        *,
        graphattn_caller: FusedCaller,
        **options: object,
    ) -> tuple[Tensor, None]:
        """[1, T, H] -> [1, T, H]"""
        module = self._module
        check_unchanged(module, self._scalars)
        rotation = self._rotation(position_embeddings)
        q, latent = self.joined(hidden_states)
        low_rank = None
        if module.q_lora_rank is not None:
            normed = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            low_rank = LowRank(q[0], module.q_a_layernorm.weight, normed[0])
        graphattn_caller.write_latent(module.layer_idx, latent[0], rotation, low_rank)
        if low_rank is not None:
            q = module.q_b_proj(normed)
        nope, width = module.qk_nope_head_dim, latent.shape[-1]
        q = q[0].unflatten(-1, (-1, nope + module.qk_rope_head_dim))
        up = up_projections(module, q.shape[1])  # [num_q_heads, nope + v, kv_lora_rank]
        absorbed = q.new_empty(*q.shape[:2], width)
        rotation.absorb(q, up[:, :nope], absorbed)
        values = graphattn_caller.attend_written(module.layer_idx, absorbed, up[:, nope:])
        result: Tensor = module.o_proj(values.flatten(1).unsqueeze(0))
        return result, None

    def _rotation(self, position_embeddings: Any) -> Rotation:
        cos, sin = self._layout.take(position_embeddings)
        return Rotation(
            cos=cos,
            sin=sin,
            pairs_in=self._layout.pairs_in,
            pairs_out=self._layout.pairs_out,
            k_weight=self._module.kv_a_layernorm.weight,
            eps=self._formula.eps,
            style=self._formula.style,
        )


def is_latent_attention(module: nn.Module) -> bool:
    """Whether a module is an attention over latents; see `transformers_latent`."""
    return is_latent(module) and has(module, "kv_a_proj_with_mqa", "kv_a_layernorm", "o_proj")


def latent_attention(module: Any, inputs: Inputs, dtype: torch.dtype) -> LatentAttention:
    """What computes the same; `UnfusedError` when nothing that we have does."""
    check_own(module)
    lora = getattr(module, "q_lora_rank", None) is not None
    query = "q_a_proj" if lora else "q_proj"
    first = linears(module, [query, "kv_a_proj_with_mqa"])
    formula = formula_of(module.kv_a_layernorm, dtype)
    if lora and formula_of(module.q_a_layernorm, dtype) != formula:
        raise UnfusedError(f"{type(module).__name__} norms queries and latents differently")
    theirs = Rehearsal()
    want = inputs.call(module, graphattn_caller=theirs)[0]

    def make(layout: Layout) -> LatentAttention:
        return LatentAttention(module, Joined(first), layout, formula)

    fused = nearest(map(make, LAYOUTS), inputs, want, theirs.heads)
    if fused is None:
        raise UnfusedError(f"{type(module).__name__} makes its latents in a way of its own")
    return fused
