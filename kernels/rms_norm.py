"""RMS norm inside kernels; see `fused_ops` for its styles."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def inverse_rms(b_sum, eps, N: tl.constexpr):
    """1 / sqrt(mean + eps) of N values whose squares sum to `b_sum`, both steps rounded to fp32."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(b_sum, N * 1.0) + eps))


@triton.jit
def weighted(b_z, b_weight, DTYPE: tl.constexpr, STYLE: tl.constexpr):
    """What a norm makes of z, fp32, before its last rounding to DTYPE."""
    if STYLE == "rounded":
        return b_weight * b_z.to(DTYPE).to(tl.float32)
    if STYLE == "offset":
        return (1.0 + b_weight) * b_z
    return b_weight * b_z
