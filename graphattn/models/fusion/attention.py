"""Attention of query, key and value heads: one projection, then norms of heads, rotation and the
write of K and V in one operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphattn.models.contract import Rotation
from graphattn.models.fusion.joined import Joined
from graphattn.models.fusion.matching import Inputs, UnfusedError, check_own, has, linears
from graphattn.models.fusion.norms import Formula, formula_of
from graphattn.models.fusion.rehearsal import Rehearsal, check_unchanged, nearest, scalars
from graphattn.models.fusion.rotations import LAYOUTS, Layout
from graphattn.models.transformers_calls import FusedCaller, Geometry


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of each query and key head; the weights are the modules' of the moment."""

    q: Any
    k: Any
    formula: Formula


class RotatedAttention:
    """In place of an attention's forward."""

    def __init__(
        self,
        module: Any,
        joined: Joined,
        geometry: Geometry,
        layout: Layout | None,
        norms: HeadNorms | None,
        sinks: str | None,
    ) -> None:
        self.joined = joined
        self._module, self._geometry, self._sinks = module, geometry, sinks
        self._layout, self._norms = layout, norms
        self._scalars = scalars(module)

    @property
    def bypassed(self) -> tuple[nn.Module, ...]:
        """Norms that are done along the way."""
        return () if self._norms is None else (self._norms.q, self._norms.k)

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        *,
        graphattn_caller: FusedCaller,
        **options: object,
    ) -> tuple[Tensor, None]:
        """[1, T, H] -> [1, T, H]"""
        module = self._module
        check_unchanged(module, self._scalars)
        q, k, v = self._heads(hidden_states)
        sinks = None if self._sinks is None else getattr(module, self._sinks)
        rotation = self._rotation(position_embeddings)
        out = graphattn_caller.attend_rotated(module.layer_idx, q, k, v, rotation, sinks)
        result: Tensor = module.o_proj(out.flatten(1).unsqueeze(0))
        return result, None

    def _heads(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """q [T, num_q_heads, head_dim], k and v [T, num_kv_heads, head_dim]: views, mostly."""
        geometry = self._geometry
        parts = self.joined(hidden_states)
        if len(parts) == 1:
            counts = (geometry.num_q_heads, geometry.num_kv_heads, geometry.num_kv_heads)
            parts = parts[0].split([n * geometry.head_dim for n in counts], -1)
        return tuple(part[0].unflatten(-1, (-1, geometry.head_dim)) for part in parts)

    def _rotation(self, position_embeddings: Any) -> Rotation:
        layout, norms = self._layout, self._norms
        cos, sin = (None, None) if layout is None else layout.take(position_embeddings)
        return Rotation(
            cos=cos,
            sin=sin,
            pairs_in=layout is not None and layout.pairs_in,
            pairs_out=layout is not None and layout.pairs_out,
            q_weight=None if norms is None else norms.q.weight,
            k_weight=None if norms is None else norms.k.weight,
            eps=0.0 if norms is None else norms.formula.eps,
            style="rounded" if norms is None else norms.formula.style,
        )


def is_attention(module: nn.Module) -> bool:
    """Whether a module has the parts of an attention that can be fused."""
    return has(module, "o_proj") and (
        has(module, "q_proj", "k_proj", "v_proj") or has(module, "qkv_proj")
    )


def rotated_attention(module: Any, inputs: Inputs, dtype: torch.dtype) -> RotatedAttention:
    """What computes the same; `UnfusedError` when nothing that we have does.

    It must hand the same queries, keys and values to the attention, and make the same of its
    result.
    """
    check_own(module)
    names = ["qkv_proj"] if has(module, "qkv_proj") else ["q_proj", "k_proj", "v_proj"]
    first = linears(module, names)
    theirs = Rehearsal()
    want = inputs.call(module, graphattn_caller=theirs)[0]
    sinks = _name_of(module, theirs.sinks)
    norms = _head_norms(module, dtype, theirs.geometry.head_dim)

    def make(layout: Layout | None) -> RotatedAttention:
        return RotatedAttention(module, Joined(first), theirs.geometry, layout, norms, sinks)

    fused = nearest(map(make, (*LAYOUTS, None)), inputs, want, theirs.heads)
    if fused is None:
        raise UnfusedError(f"{type(module).__name__} makes its heads in a way of its own")
    return fused


def _head_norms(module: Any, dtype: torch.dtype, head_dim: int) -> HeadNorms | None:
    q, k = (getattr(module, name, None) for name in ("q_norm", "k_norm"))
    if q is None and k is None:
        return None
    if q is None or k is None:
        raise UnfusedError(f"{type(module).__name__} norms only one of queries and keys")
    formula = formula_of(q, dtype)
    if len(q.weight) != head_dim:
        raise UnfusedError(f"{type(module).__name__} norms queries and keys over all heads at once")
    if formula_of(k, dtype) != formula or q.weight.shape != k.weight.shape:
        raise UnfusedError(f"{type(module).__name__} norms queries and keys differently")
    return HeadNorms(q, k, formula)


def _name_of(module: nn.Module, sinks: Tensor | None) -> str | None:
    """The parameter that a module hands on as its sinks."""
    if sinks is None:
        return None
    for name, parameter in module.named_parameters(recurse=False):
        if parameter is sinks:
            return name
    raise UnfusedError(f"{type(module).__name__} computes its attention sinks")
