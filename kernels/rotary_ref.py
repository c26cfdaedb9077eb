"""Oracle of the rotation inside `fused_ops`: float64, one pair at a time, nothing rounded."""

from __future__ import annotations

from torch import Tensor


def rotate_ref(x: Tensor, cos: Tensor, sin: Tensor, *, pairs_in: bool, pairs_out: bool) -> Tensor:
    """x [T, heads, D] with its first 2 * cos.shape[1] values rotated, float64 on the CPU."""
    x, cos, sin = x.double().cpu(), cos.double().cpu(), sin.double().cpu()
    turned = x.clone()
    pairs = cos.shape[1]
    for t in range(x.shape[0]):
        for i in range(pairs):
            a_in, b_in = (2 * i, 2 * i + 1) if pairs_in else (i, i + pairs)
            a_out, b_out = (2 * i, 2 * i + 1) if pairs_out else (i, i + pairs)
            a, b = x[t, :, a_in], x[t, :, b_in]
            turned[t, :, a_out] = a * cos[t, i] - b * sin[t, i]
            turned[t, :, b_out] = b * cos[t, i] + a * sin[t, i]
    return turned
