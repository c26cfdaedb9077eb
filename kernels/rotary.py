"""Heads whose first values are rotated, inside kernels; see `fused_ops` for the rotation.

A head of D values is held as three blocks: the two values of each of HALF pairs, and the PASS
values that are not rotated. Blocks have at least one column, whatever is masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE = 2048  # values of the heads that one program holds


def heads_per_program(heads: int, dim: int) -> int:
    """A power of two."""
    fitting = max(1, TILE // int(triton.next_power_of_2(dim)))
    return min(fitting, int(triton.next_power_of_2(heads)))


def padded(size: int) -> int:
    """Columns of a block of `size` values."""
    return int(triton.next_power_of_2(max(1, size)))


@triton.jit
def pair_offsets(o_pair, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """Where the two values of a pair lie: side by side, or half the rotated part apart."""
    if PAIRS:
        return 2 * o_pair, 2 * o_pair + 1
    return o_pair, o_pair + HALF


@triton.jit
def load_angles(ptr, o_row, stride, HALF: tl.constexpr, HALF_PADDED: tl.constexpr):
    """cos or sin of one token: [1, HALF_PADDED], fp32."""
    o_pair = tl.arange(0, HALF_PADDED)[None, :]
    return tl.load(ptr + o_row + o_pair.to(tl.int64) * stride, mask=o_pair < HALF).to(tl.float32)


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
