"""Prefill rows of `attend_latent`: a block of query places over all of its KV, never split."""

from __future__ import annotations

import triton
import triton.language as tl

from .attend_latent_tile import LATENT_INTEGERS, attend_latent_range, load_query
from .attend_tile import LN2, LOG2E, normalise, visible_ranges


@triton.jit(do_not_specialize=LATENT_INTEGERS)
def latent_prefill_kernel(
    q_ptr,
    pool_ptr,
    scale_ptr,
    page_table_ptr,
    slot_of_row_ptr,
    query_start_ptr,
    visible_start_ptr,
    visible_end_ptr,
    items_ptr,
    count_ptr,
    out_ptr,
    lse_ptr,
    scale,
    q_token,
    q_head,
    pool_page,
    table_slot,
    query_places,
    STRIDE_UNIT: tl.constexpr,
    ENTRY: tl.constexpr,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    DR: tl.constexpr,
    DV_PADDED: tl.constexpr,
    DR_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    READ: tl.constexpr,
):
    """Items (row, block of `query_places` places): all of their KV, written directly."""
    tiles = tl.cdiv(query_places * HEADS, BLOCK_M)
    total = tl.load(count_ptr) * tiles
    for w in range(tl.program_id(0), total, tl.num_programs(0)):
        item = w // tiles
        row = tl.load(items_ptr + item * 2)
        block = tl.load(items_ptr + item * 2 + 1)
        slot = tl.load(slot_of_row_ptr + row).to(tl.int64)
        first = tl.load(query_start_ptr + row) + block * query_places
        query_len = tl.load(query_start_ptr + row + 1) - first

        o_m = w % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
        o_place = o_m // HEADS  # within the block
        m_m = o_place < tl.minimum(query_places, query_len)
        b_start, b_end, lo, hi = visible_ranges(
            visible_start_ptr + first, visible_end_ptr + first, o_place, m_m
        )
        o_q = (first + o_place).to(tl.int64) * q_token + o_m % HEADS * q_head
        b_qv, b_qr = load_query(q_ptr, o_q, m_m, DV, DR, STRIDE_UNIT, DV_PADDED, DR_PADDED, WIDEN)
        value_scale = scale
        rope_scale = scale
        if scale_ptr is not None:
            value_scale *= tl.load(scale_ptr)
            rope_scale *= tl.load(scale_ptr + 1)
        b_acc, b_sum, b_max = attend_latent_range(
            b_qv,
            b_qr,
            m_m,
            b_start,
            b_end,
            lo,
            hi,
            pool_ptr,
            page_table_ptr + slot * table_slot,
            pool_page,
            value_scale * LOG2E,
            rope_scale * LOG2E,
            STRIDE_UNIT,
            ENTRY,
            DV,
            DR,
            PAGE_SIZE,
            BLOCK_M,
            BLOCK_N,
            PRECISION,
            READ,
        )
        b_out, b_lse = normalise(b_acc, b_sum, b_max)
        if scale_ptr is not None:
            b_out *= tl.load(scale_ptr)
        o_v = tl.arange(0, DV_PADDED)[None, :]
        p_out = out_ptr + first.to(tl.int64) * (HEADS * DV) + o_m[:, None] * DV + o_v
        tl.store(p_out, b_out, mask=m_m[:, None] & (o_v < DV))
        tl.store(lse_ptr + first.to(tl.int64) * HEADS + o_m, b_lse * LN2, mask=m_m)
