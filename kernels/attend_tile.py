"""The inner loop that the decode and the prefill kernel share: one tile over one range of KV."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from .fp8 import entry_values

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))
NO_POSITION = tl.constexpr(2**31 - 1)

# Integer arguments of both kernels. None is specialized: a value of 1, or a multiple of 16, would
# compile another variant, perhaps inside a capture.
TILE_INTEGERS = [
    "q_token",
    "q_head",
    "k_page",
    "k_head",
    "v_page",
    "v_head",
    "table_slot",
    "query_places",
]


@triton.jit
def visible_ranges(start_ptr, end_ptr, o_t, m_t):
    """Ranges of a tile's rows, (0, 0) where masked, and the union [lo, hi) of the non-empty.

    [0, 0) when all are empty: a pipelined loop tests positions some blocks past its start, so a
    start near the largest integer would wrap around and load.
    """
    b_start = tl.load(start_ptr + o_t, mask=m_t, other=0)
    b_end = tl.load(end_ptr + o_t, mask=m_t, other=0)
    m_seen = b_end > b_start
    lo = tl.min(tl.where(m_seen, b_start, NO_POSITION), 0)
    hi = tl.max(tl.where(m_seen, b_end, 0), 0)
    return b_start, b_end, tl.minimum(lo, hi), hi


@triton.jit
def attend_range(
    b_q,
    b_start,
    b_end,
    lo,
    hi,
    k_ptr,
    v_ptr,
    table_ptr,
    k_page,
    v_page,
    scale,
    softcap,
    STRIDE_UNIT: tl.constexpr,
    K_ENTRY: tl.constexpr,
    V_ENTRY: tl.constexpr,
    D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    READ: tl.constexpr,
):
    """Unnormalised attention of the tile over [lo, hi): sum of p v, sum of p, maximum (base 2)."""
    D_PADDED: tl.constexpr = b_q.shape[1]
    o_d = tl.arange(0, D_PADDED)
    o_block = tl.arange(0, BLOCK_N)
    b_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_M,), tl.float32)
    b_acc = tl.zeros((BLOCK_M, D_PADDED), tl.float32)
    start = lo // BLOCK_N * BLOCK_N
    if PAGE_SIZE % BLOCK_N == 0:
        next_page = tl.load(table_ptr + start // PAGE_SIZE, mask=lo < hi, other=0)
    for n in range(start, hi, BLOCK_N):
        o_n = n + o_block
        m_n = (o_n >= lo) & (o_n < hi)
        if PAGE_SIZE % BLOCK_N == 0:  # the block lies in one page, and some of it is visible
            page = next_page.to(tl.int64)
            following = n + BLOCK_N
            next_page = tl.load(table_ptr + following // PAGE_SIZE, mask=following < hi, other=0)
            first = n % PAGE_SIZE
            p_k = k_ptr + page * k_page * STRIDE_UNIT + first.to(tl.int64) * K_ENTRY
            p_v = v_ptr + page * v_page * STRIDE_UNIT + first.to(tl.int64) * V_ENTRY
            o_k = o_block.to(tl.int64) * K_ENTRY
            o_v = o_block.to(tl.int64) * V_ENTRY
        else:
            page = tl.load(table_ptr + o_n // PAGE_SIZE, mask=m_n, other=0).to(tl.int64)
            p_k = k_ptr
            p_v = v_ptr
            o_entry = (o_n % PAGE_SIZE).to(tl.int64)
            o_k = page * k_page * STRIDE_UNIT + o_entry * K_ENTRY
            o_v = page * v_page * STRIDE_UNIT + o_entry * V_ENTRY
        m_k = m_n[None, :] & (o_d < D)[:, None]
        m_v = m_n[:, None] & (o_d < D)[None, :]
        b_k = tl.load(p_k + o_k[None, :] + o_d[:, None], mask=m_k, other=0.0)  # [D, N]
        b_v = tl.load(p_v + o_v[:, None] + o_d[None, :], mask=m_v, other=0.0)  # [N, D]
        b_k = entry_values(b_k, b_q.dtype, READ)
        b_v = entry_values(b_v, b_q.dtype, READ)
        b_s = tl.dot(b_q, b_k, input_precision=PRECISION)  # [M, N]
        if SOFTCAP:
            b_s = _tanh(b_s * (scale / softcap)) * (softcap * LOG2E)
        else:
            b_s = b_s * (scale * LOG2E)
        b_s = visible_scores(b_s, o_n, b_start, b_end)
        b_p, b_decay, b_sum, b_max = online_softmax_update(b_s, b_sum, b_max)
        b_acc = b_acc * b_decay[:, None]
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
    return b_acc, b_sum, b_max


@triton.jit
def visible_scores(b_s, o_n, b_start, b_end):
    """Scores [M, N] of the positions `o_n`, -inf where a row does not see the position."""
    m_s = (o_n[None, :] >= b_start[:, None]) & (o_n[None, :] < b_end[:, None])
    return tl.where(m_s, b_s, float("-inf"))


@triton.jit
def online_softmax_update(b_s, b_sum, b_max):
    """Take in scores [M, N] (base 2).

    Returns their weights, the decay of what was summed before, and the new sum and maximum.
    """
    b_new_max = tl.maximum(b_max, tl.max(b_s, 1))
    # A row that has seen nothing yet has maximum -inf, and -inf - -inf is NaN.
    b_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
    b_p = tl.exp2(b_s - b_base[:, None])
    b_decay = tl.exp2(b_max - b_base)
    return b_p, b_decay, b_sum * b_decay + tl.sum(b_p, 1), b_new_max


@triton.jit
def _tanh(x):
    """From exp2 alone, so that the interpreter has it; exact at infinity, NaN stays NaN."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    y = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -y, y)


@triton.jit
def normalise(b_acc, b_sum, b_max):
    """Output and lse in base 2; (0, -inf) where the sum is empty. NaN stays visible as NaN."""
    m_empty = b_sum == 0.0
    b_divisor = tl.where(m_empty, 1.0, b_sum)
    b_lse = tl.where(m_empty, float("-inf"), b_max + tl.log2(b_divisor))
    return b_acc / b_divisor[:, None], b_lse
