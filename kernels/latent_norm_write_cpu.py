"""Norm of a query's low-rank part, norm, rotation and write of latents, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from .latent_write_cpu import latent_write
from .rms_norm_cpu import rms_norm
from .rotary_cpu import rotate


def latent_norm_write(
    q: Tensor | None,
    q_weight: Tensor | None,
    q_out: Tensor | None,
    latent: Tensor,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor,
    kv_slot: Tensor,
    pool: Tensor,
    latent_scale: Tensor | None,
    eps: float,
    style: str,
    pairs_in: bool,
    pairs_out: bool,
) -> None:
    """See `fused_ops.latent_norm_write`."""
    if q is not None and q_weight is not None and q_out is not None:
        rms_norm(q, q_weight, q_out, eps, style)
    value_dim = weight.shape[0]
    entry = torch.empty_like(latent)
    rms_norm(latent[:, :value_dim], weight, entry[:, :value_dim], eps, style)
    key, rotated = (x[:, None, value_dim:] for x in (latent, entry))
    rotate(key, cos, sin, rotated, pairs_in=pairs_in, pairs_out=pairs_out)
    latent_write(entry, kv_slot, pool, latent_scale, value_dim)
