"""Heads whose first values are rotated, inside kernels; see `fused_ops` for the rotation.

A head of D values is held as three blocks: the two values of each of HALF pairs, and the PASS
values that are not rotated. Blocks have at least one column, whatever is masked.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor, float32

from .strides import stride_unit

TILE = 2048  # values of the heads that one program holds


def heads_per_program(heads: int, dim: int) -> int:
    """A power of two."""
    fitting = max(1, TILE // int(triton.next_power_of_2(dim)))
    return min(fitting, int(triton.next_power_of_2(heads)))


def padded(size: int) -> int:
    """Columns of a block of `size` values."""
    return int(triton.next_power_of_2(max(1, size)))


def angle_constants(q: Tensor, cos: Tensor | None, sin: Tensor | None) -> dict[str, Any]:
    """Compile-time arguments that say how angles lie and how products with them are rounded."""
    angles = [angle for angle in (cos, sin) if angle is not None]
    cos_pair, sin_pair = (angle.stride(1) for angle in angles) if angles else (0, 0)
    return {
        "ANGLE_UNIT": stride_unit(angle.stride(0) for angle in angles),
        "COS_PAIR": cos_pair,
        "SIN_PAIR": sin_pair,
        "ROUND": any(angle.dtype == q.dtype for angle in angles),
    }


def angle_rows(cos: Tensor | None, sin: Tensor | None) -> tuple[int, ...]:
    """Strides of a token's angles, in the unit of `angle_constants`."""
    rows = [0 if angle is None else angle.stride(0) for angle in (cos, sin)]
    unit = stride_unit(rows)
    return tuple(row // unit for row in rows)


def check_angles(q: Tensor, cos: Tensor | None, sin: Tensor | None) -> None:
    """Raise `ValueError` unless both are None or rotate all or the first values of q's heads."""
    if (cos is None) != (sin is None):
        raise ValueError("sin: wanted together with cos, or neither")
    for name, angle in (("cos", cos), ("sin", sin)):
        if angle is None or cos is None:
            continue
        half = cos.shape[-1]
        if angle.shape != (q.shape[0], half) or not 1 <= half <= q.shape[2] // 2:
            raise ValueError(
                f"{name}: wanted [{q.shape[0]}, R / 2], R from 2 to {q.shape[2]}, "
                f"got shape {tuple(angle.shape)}"
            )
        if angle.dtype not in (q.dtype, float32) or angle.dtype != cos.dtype:
            raise ValueError(f"{name}: wanted {q.dtype} or float32, got {angle.dtype}")


def check_all_angles(q: Tensor, cos: Tensor, sin: Tensor) -> None:
    """As `check_angles`, where all values of a head are rotated."""
    check_angles(q, cos, sin)
    if 2 * cos.shape[1] != q.shape[2]:
        wanted = (q.shape[0], q.shape[2] // 2)
        raise ValueError(f"cos: wanted shape {wanted}, got {tuple(cos.shape)}")


@triton.jit
def pair_offsets(o_pair, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """Where the two values of a pair lie: side by side, or half the rotated part apart."""
    if PAIRS:
        return 2 * o_pair, 2 * o_pair + 1
    return o_pair, o_pair + HALF


@triton.jit
def load_angles(p_row, STRIDE: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr):
    """cos or sin of one token, STRIDE apart: [1, HALF_PADDED], fp32."""
    o_pair = tl.arange(0, HALF_PADDED)[None, :]
    return tl.load(p_row + o_pair * STRIDE, mask=o_pair < HALF).to(tl.float32)


@triton.jit
def rotated(b_a, b_b, b_cos, b_sin, DTYPE: tl.constexpr, ROUND: tl.constexpr):
    """Pairs turned by their angles, fp32, before the last rounding to DTYPE.

    ROUND: products are rounded to DTYPE.
    """
    b_ac, b_bs, b_bc, b_as = b_a * b_cos, b_b * b_sin, b_b * b_cos, b_a * b_sin
    if ROUND:
        b_ac, b_bs = b_ac.to(DTYPE).to(tl.float32), b_bs.to(DTYPE).to(tl.float32)
        b_bc, b_as = b_bc.to(DTYPE).to(tl.float32), b_as.to(DTYPE).to(tl.float32)
    return b_ac - b_bs, b_bc + b_as
