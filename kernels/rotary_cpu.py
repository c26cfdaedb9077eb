"""Rotary position embedding on the CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

SMALL = 4096  # values: below, NumPy's cheaper views win over torch's faster loops


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, *, pairs_in: bool, pairs_out: bool
) -> None:
    """Rotate the first R values of x [T, heads, D] into `out`, as `fused_ops` defines it, and copy
    the others; cos and sin [T, R / 2]."""
    rotated = 2 * cos.shape[1]
    if rotated < x.shape[2]:
        out[..., rotated:].copy_(x[..., rotated:])
        x, out = x[..., :rotated], out[..., :rotated]
    rounds_once = cos.dtype != out.dtype  # angles in fp32, values not
    if x.numel() <= SMALL and out.dtype == torch.float32:
        _rotate_small(x, cos, sin, out, pairs_in, pairs_out)
    elif rounds_once:
        wide = torch.empty(x.shape, dtype=cos.dtype)
        _rotate(x, cos, sin, wide, pairs_in, pairs_out)
        out.copy_(wide)
    else:
        _rotate(x, cos, sin, out, pairs_in, pairs_out)


def _rotate(
    x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, pairs_in: bool, pairs_out: bool
) -> None:
    """All values of x, in the dtype of `out`."""
    pairs, target = _pairs(x, pairs_in), _pairs(out, pairs_out)
    cos, sin = (angle.unsqueeze(1).unsqueeze(1) for angle in (cos, sin))  # over heads and pairs
    by_sin = pairs * sin
    a, b = torch.mul(pairs, cos, out=target).unbind(2)
    sin_a, sin_b = by_sin.unbind(2)
    a.sub_(sin_b)
    b.add_(sin_a)


def _pairs(x: Tensor, adjacent: bool) -> Tensor:
    """View of x [T, heads, R] as [T, heads, 2, R / 2]."""
    tokens, heads, rotated = x.shape
    if adjacent:
        return x.view(tokens, heads, rotated // 2, 2).transpose(2, 3)
    return x.view(tokens, heads, 2, rotated // 2)


def _rotate_small(
    x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, pairs_in: bool, pairs_out: bool
) -> None:
    """`_rotate` of fp32, with the same roundings."""
    a, b = _parts(x.numpy(), pairs_in)
    out_a, out_b = _parts(out.numpy(), pairs_out)
    c, s = cos.numpy()[:, None], sin.numpy()[:, None]
    np.multiply(a, c, out=out_a)
    out_a -= b * s
    np.multiply(b, c, out=out_b)
    out_b += a * s


def _parts(x: np.ndarray, adjacent: bool) -> tuple[np.ndarray, np.ndarray]:
    """The two values of each pair of x [T, heads, R]."""
    half = x.shape[2] // 2
    return (x[..., ::2], x[..., 1::2]) if adjacent else (x[..., :half], x[..., half:])
