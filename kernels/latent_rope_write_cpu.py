"""Rotation of Q's rope part, norm, rotation and write of latents, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from .latent_write_cpu import latent_write
from .rms_norm_cpu import rms_norm
from .rotary_cpu import over_pairs, rotate


def latent_rope_write(
    q: Tensor,
    latent: Tensor,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor,
    kv_slot: Tensor,
    q_out: Tensor,
    pool: Tensor,
    latent_scale: Tensor | None,
    eps: float,
    style: str,
    pairs_in: bool,
    pairs_out: bool,
) -> None:
    """See `fused_ops.latent_rope_write`."""
    value_dim = weight.shape[0]
    entry = torch.empty_like(latent)
    rms_norm(latent[:, :value_dim], weight, entry[:, :value_dim], eps, style)
    cos, sin = over_pairs(cos), over_pairs(sin)
    rope_keys = (latent[:, None, value_dim:], entry[:, None, value_dim:])
    for x, out in ((q, q_out), rope_keys):
        rotate(x, cos, sin, out, pairs_in=pairs_in, pairs_out=pairs_out)
    latent_write(entry, kv_slot, pool, latent_scale, value_dim)
