"""Latent attention (MLA): the projections of the hidden state in one product, and the norm of the
latent, both rotations and the write in one operation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from graphattn.models.contract import Rotation
from graphattn.models.fusion.joined import Joined
from graphattn.models.fusion.matching import Inputs, UnfusedError, check_own, has, linears
from graphattn.models.fusion.norms import Formula, formula_of
from graphattn.models.fusion.rehearsal import Rehearsal, check_unchanged, nearest, scalars
from graphattn.models.fusion.rotations import LAYOUTS, Layout
from graphattn.models.transformers_calls import Caller
from graphattn.models.transformers_latent import is_latent, up_projections


class LatentAttention:
    """In place of a latent attention's forward. Products per head write where they are needed."""

    def __init__(self, module: Any, joined: Joined, layout: Layout, formula: Formula) -> None:
        self.joined = joined
        self._module, self._layout, self._formula = module, layout, formula
        self._scalars = scalars(module)

    @property
    def bypassed(self) -> tuple[nn.Module, ...]:
        """Norms that are done along the way."""
        return (self._module.kv_a_layernorm,)

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        *,
        graphattn_caller: Caller,
        **options: object,
    ) -> tuple[Tensor, None]:
        """[1, T, H] -> [1, T, H]"""
        module = self._module
        check_unchanged(module, self._scalars)
        nope, rank, rope = module.qk_nope_head_dim, module.kv_lora_rank, module.qk_rope_head_dim
        q, latent = self.joined(hidden_states)
        if module.q_lora_rank is not None:
            q = module.q_b_proj(module.q_a_layernorm(q))
        q = q[0].unflatten(-1, (-1, nope + rope))
        tokens, heads, _ = q.shape
        up = up_projections(module, heads)  # [H, nope + v, rank]
        absorbed = q.new_empty(tokens, heads, rank + rope)
        into = absorbed[..., :rank].transpose(0, 1)
        torch.bmm(q[..., :nope].transpose(0, 1), up[:, :nope], out=into)
        rotation = self._rotation(position_embeddings)
        averages = graphattn_caller.attend_latent_rotated(
            module.layer_idx, absorbed, q[..., nope:], latent[0], rotation
        )
        values = q.new_empty(tokens, heads, up.shape[1] - nope)
        torch.bmm(
            averages.transpose(0, 1), up[:, nope:].transpose(1, 2), out=values.transpose(0, 1)
        )
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
    theirs = Rehearsal()
    want = inputs.call(module, graphattn_caller=theirs)[0]

    def make(layout: Layout) -> LatentAttention:
        return LatentAttention(module, Joined(first), layout, formula)

    fused = nearest(map(make, LAYOUTS), inputs, want, theirs.heads)
    if fused is None:
        raise UnfusedError(f"{type(module).__name__} makes its latents in a way of its own")
    return fused
