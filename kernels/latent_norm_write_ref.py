"""Oracle of `latent_norm_write`: what becomes of Q and the latents, float64, nothing rounded."""

from __future__ import annotations

import torch
from torch import Tensor

from .rms_norm_ref import rms_norm_ref
from .rotary_ref import rotate_ref


def latent_norm_write_ref(
    q: Tensor,
    q_weight: Tensor,
    latent: Tensor,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor,
    eps: float,
    style: str,
    *,
    pairs_in: bool,
    pairs_out: bool,
) -> tuple[Tensor, Tensor]:
    """Exact q_out [T, N] and latents [T, C + R], float64 on the CPU. `latent_write_ref` writes."""
    value_dim = weight.shape[0]
    normed = rms_norm_ref(latent[:, :value_dim], weight, eps, style)
    key = latent[:, None, value_dim:]
    rotated = rotate_ref(key, cos, sin, pairs_in=pairs_in, pairs_out=pairs_out)
    return rms_norm_ref(q, q_weight, eps, style), torch.cat([normed, rotated[:, 0]], dim=1)
