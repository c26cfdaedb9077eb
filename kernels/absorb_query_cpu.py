"""Queries in the space of the latents, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from .rotary_cpu import rotate


def absorb_query(
    q: Tensor,
    up: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_out: Tensor,
    pairs_in: bool,
    pairs_out: bool,
) -> None:
    """See `fused_ops.absorb_query`."""
    nope, value_dim = up.shape[1:]
    torch.bmm(q[..., :nope].transpose(0, 1), up, out=q_out[..., :value_dim].transpose(0, 1))
    rope, target = q[..., nope:], q_out[..., value_dim:]
    rotate(rope, cos, sin, target, pairs_in=pairs_in, pairs_out=pairs_out)
