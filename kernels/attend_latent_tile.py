"""The inner loop that the decode and the prefill kernel of latent attention share."""

from __future__ import annotations

import triton
import triton.language as tl

from .attend_tile import NO_POSITION, online_softmax_update, visible_scores
from .fp8 import entry_values

# Integer arguments of both kernels. None is specialized: a value of 1, or a multiple of 16, would
# compile another variant, perhaps inside a capture.
LATENT_INTEGERS = ["q_token", "q_head", "pool_page", "table_slot", "query_places"]


@triton.jit
def load_query(
    q_ptr, o_q, m_m, DV: tl.constexpr, DR: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    DV_PADDED: tl.constexpr, DR_PADDED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Query rows at `o_q` in two parts: for the values of an entry and for its rope key."""
    o_v = tl.arange(0, DV_PADDED)[None, :]
    o_r = tl.arange(0, DR_PADDED)[None, :]
    p_q = q_ptr + o_q[:, None] * STRIDE_UNIT
    b_qv = tl.load(p_q + o_v, mask=m_m[:, None] & (o_v < DV), other=0.0)
    b_qr = tl.load(p_q + DV + o_r, mask=m_m[:, None] & (o_r < DR), other=0.0)
    if WIDEN:
        b_qv = b_qv.to(tl.float32)
        b_qr = b_qr.to(tl.float32)
    return b_qv, b_qr


@triton.jit
def attend_latent_range(
    b_qv,
    b_qr,
    m_m,
    b_start,
    b_end,
    lo,
    hi,
    pool_ptr,
    table_ptr,
    pool_page,
    value_scale_log2,
    rope_scale_log2,
    STRIDE_UNIT: tl.constexpr,
    ENTRY: tl.constexpr,
    DV: tl.constexpr,
    DR: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    READ: tl.constexpr,
):
    """Unnormalised attention of the tile over [lo, hi): sum of p v, sum of p, maximum (base 2).

    The values of a block are loaded once and serve both dots; the load puts zeros past the end,
    where stale entries may hold NaN.
    """
    o_v = tl.arange(0, b_qv.shape[1])[None, :]
    o_r = tl.arange(0, b_qr.shape[1])[None, :]
    o_block = tl.arange(0, BLOCK_N)
    b_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_M,), tl.float32)
    b_acc = tl.zeros((BLOCK_M, b_qv.shape[1]), tl.float32)
    # Every row of the tile sees the positions [all_from, all_to).
    all_from = tl.max(b_start, 0)
    all_to = tl.min(tl.where(m_m, b_end, NO_POSITION), 0)
    start = lo // BLOCK_N * BLOCK_N
    if PAGE_SIZE % BLOCK_N == 0:
        next_page = tl.load(table_ptr + start // PAGE_SIZE, mask=lo < hi, other=0)
    # Two copies of the scores in tensor memory (sm_100) would take the loop apart: half as many
    # instructions and 36 KB less shared memory without, and nothing else changes elsewhere.
    for n in tl.range(start, hi, BLOCK_N, disallow_acc_multi_buffer=True):
        o_n = n + o_block
        m_n = (o_n >= lo) & (o_n < hi)
        if PAGE_SIZE % BLOCK_N == 0:  # the block lies in one page, and some of it is visible
            page = next_page.to(tl.int64)
            following = n + BLOCK_N
            next_page = tl.load(table_ptr + following // PAGE_SIZE, mask=following < hi, other=0)
            first = n % PAGE_SIZE
            p_n = pool_ptr + page * pool_page * STRIDE_UNIT + first.to(tl.int64) * ENTRY
            o_entry = o_block.to(tl.int64) * ENTRY
        else:
            page = tl.load(table_ptr + o_n // PAGE_SIZE, mask=m_n, other=0).to(tl.int64)
            p_n = pool_ptr
            o_entry = page * pool_page * STRIDE_UNIT + (o_n % PAGE_SIZE).to(tl.int64) * ENTRY
        p_entry = p_n + o_entry[:, None]
        b_v = tl.load(p_entry + o_v, mask=m_n[:, None] & (o_v < DV), other=0.0)  # [N, DV]
        b_r = tl.load(p_entry + DV + o_r, mask=m_n[:, None] & (o_r < DR), other=0.0)  # [N, DR]
        b_v = entry_values(b_v, b_qv.dtype, READ)
        b_r = entry_values(b_r, b_qr.dtype, READ)
        # Neither dot of the scores leads to another dot without a branch between (the sum of two
        # scaled terms is no accumulation): else the compiler gives each warp group of sm_90 all
        # positions, for reductions within a warp, and both compute the same.
        b_s = tl.dot(b_qr, tl.trans(b_r), input_precision=PRECISION) * rope_scale_log2  # [M, N]
        b_s += tl.dot(b_qv, tl.trans(b_v), input_precision=PRECISION) * value_scale_log2
        if (n < all_from) | (n + BLOCK_N > all_to):
            b_s = visible_scores(b_s, o_n, b_start, b_end)
        b_p, b_decay, b_sum, b_max = online_softmax_update(b_s, b_sum, b_max)
        b_acc = b_acc * b_decay[:, None]
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
    return b_acc, b_sum, b_max
