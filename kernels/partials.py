"""What the kernels over the partial attention of several ranks share: weights and order of rows.

With lse_w of rank w and the sink, base = max(lse_w, sink):

    divisor = sum_w exp(lse_w - base) + exp(sink - base)
    weight_w = exp(lse_w - base) / divisor

Where nothing is seen, base is 0 and divisor 1, so that every weight is 0 and none is NaN. A NaN
among the LSEs makes all weights of its row NaN: a poisoned request stays visible.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE = 2048  # output values per program


def rows_per_program(dim: int) -> int:
    """Rows of `dim` values that fill one program's tile."""
    return max(1, TILE // int(triton.next_power_of_2(dim)))


@triton.jit
def source_row(row, tokens, HEADS: tl.constexpr, SLICES: tl.constexpr):
    """Row of [T, HEADS] that stands at place `row` of [SLICES, T, HEADS / SLICES]."""
    SHARE: tl.constexpr = HEADS // SLICES
    in_slice = row % (tokens * SHARE)
    head = row // (tokens * SHARE) * SHARE + in_slice % SHARE
    return in_slice // SHARE * HEADS + head


@triton.jit
def load_sinks(sinks_ptr, o_head, m_row):
    """Sinks of `o_head`, -inf where there are none."""
    b_sink = tl.full(o_head.shape, float("-inf"), tl.float32)
    if sinks_ptr is not None:
        b_sink = tl.load(sinks_ptr + o_head, mask=m_row, other=float("-inf"))
    return b_sink


@triton.jit
def union_weights(p_lse, rank_stride, b_sink, m_row, RANKS: tl.constexpr):
    """(base, divisor) of rows whose LSEs lie at `p_lse`, `rank_stride` apart from rank to rank."""
    b_base = b_sink
    for w in tl.static_range(RANKS):
        b_lse = tl.load(p_lse + w * rank_stride, mask=m_row, other=float("-inf"))
        b_base = tl.maximum(b_base, b_lse)
    b_base = tl.where(b_base == float("-inf"), 0.0, b_base)
    b_sum = tl.exp(b_sink - b_base)
    for w in tl.static_range(RANKS):
        b_lse = tl.load(p_lse + w * rank_stride, mask=m_row, other=float("-inf"))
        b_sum += tl.exp(b_lse - b_base)
    return b_base, tl.where(b_sum == 0.0, 1.0, b_sum)
