"""Rotary position embedding on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor


def over_pairs(angles: Tensor) -> Tensor:
    """cos or sin [T, R / 2] as [T, 1, 1, R / 2], which fits the pairs of every head."""
    return angles.unsqueeze(1).unsqueeze(1)


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, *, pairs_in: bool, pairs_out: bool
) -> None:
    """Rotate the first R values of x [T, heads, D] into `out`, as `fused_ops` defines it, and copy
    the others; cos and sin [T, 1, 1, R / 2]."""
    rotated = 2 * cos.shape[3]
    if rotated < x.shape[2]:
        out[..., rotated:].copy_(x[..., rotated:])
        x, out = x[..., :rotated], out[..., :rotated]
    pairs, target = _pairs(x, pairs_in), _pairs(out, pairs_out)
    by_sin = pairs * sin
    in_place = by_sin.dtype == out.dtype  # else fp32, rounded once
    result = torch.mul(pairs, cos, out=target) if in_place else pairs * cos
    a, b = result.unbind(2)
    sin_a, sin_b = by_sin.unbind(2)
    a.sub_(sin_b)
    b.add_(sin_a)
    if not in_place:
        target.copy_(result)


def _pairs(x: Tensor, adjacent: bool) -> Tensor:
    """View of x [T, heads, R] as [T, heads, 2, R / 2]."""
    tokens, heads, rotated = x.shape
    if adjacent:
        return x.view(tokens, heads, rotated // 2, 2).transpose(2, 3)
    return x.view(tokens, heads, 2, rotated // 2)
