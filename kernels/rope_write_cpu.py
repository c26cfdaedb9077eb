"""Norm and rotation of Q and K, and the KV write, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from .kv_write_cpu import kv_write
from .rms_norm_cpu import rms_norm
from .rotary_cpu import rotate


def rope_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    kv_slot: Tensor,
    q_out: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    eps: float,
    style: str,
    pairs_in: bool,
    pairs_out: bool,
) -> None:
    """See `fused_ops.rope_write`."""
    if q_weight is not None and k_weight is not None:
        q, k = (_normed(x, w, eps, style) for x, w in ((q, q_weight), (k, k_weight)))
    if cos is not None and sin is not None:
        turned = torch.empty_like(k)
        rotate(q, cos, sin, q_out, pairs_in=pairs_in, pairs_out=pairs_out)
        rotate(k, cos, sin, turned, pairs_in=pairs_in, pairs_out=pairs_out)
        k = turned
    else:
        q_out.copy_(q)
    kv_write(k, v, kv_slot, k_pool, v_pool, k_scale, v_scale)


def _normed(x: Tensor, weight: Tensor, eps: float, style: str) -> Tensor:
    out = torch.empty_like(x)
    rms_norm(x, weight, out, eps, style)
    return out
