"""Prefill rows of `attend`: a block of query places over all of its KV, never split."""

from __future__ import annotations

import triton
import triton.language as tl

from .attend_tile import LN2, LOG2E, TILE_INTEGERS, attend_range, normalise, visible_ranges


@triton.jit(do_not_specialize=TILE_INTEGERS)
def prefill_kernel(
    q_ptr,
    k_pool_ptr,
    v_pool_ptr,
    k_scale_ptr,
    v_scale_ptr,
    page_table_ptr,
    slot_of_row_ptr,
    query_start_ptr,
    visible_start_ptr,
    visible_end_ptr,
    items_ptr,
    count_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    scale,
    softcap,
    q_token,
    q_head,
    k_page,
    k_head,
    v_page,
    v_head,
    table_slot,
    query_places,
    STRIDE_UNIT: tl.constexpr,
    K_ENTRY: tl.constexpr,
    V_ENTRY: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    READ: tl.constexpr,
    K_SCALE_HEAD: tl.constexpr,
    V_SCALE_HEAD: tl.constexpr,
):
    """Items (row, block of `query_places` places): all of their KV, written directly."""
    tiles = tl.cdiv(query_places * GROUP, BLOCK_M)
    total = tl.load(count_ptr) * (KV_HEADS * tiles)
    o_d = tl.arange(0, D_PADDED)
    m_d = (o_d < D)[None, :]
    for w in range(tl.program_id(0), total, tl.num_programs(0)):
        item = w // (KV_HEADS * tiles)
        kv_head = w // tiles % KV_HEADS
        row = tl.load(items_ptr + item * 2)
        block = tl.load(items_ptr + item * 2 + 1)
        slot = tl.load(slot_of_row_ptr + row).to(tl.int64)
        first = tl.load(query_start_ptr + row) + block * query_places
        query_len = tl.load(query_start_ptr + row + 1) - first

        o_m = w % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
        o_place = o_m // GROUP  # within the block
        o_head = kv_head * GROUP + o_m % GROUP
        m_m = o_place < tl.minimum(query_places, query_len)
        b_start, b_end, lo, hi = visible_ranges(
            visible_start_ptr + first, visible_end_ptr + first, o_place, m_m
        )
        o_q = (first + o_place).to(tl.int64) * q_token + o_head * q_head
        b_q = tl.load(
            q_ptr + o_q[:, None] * STRIDE_UNIT + o_d[None, :], mask=m_m[:, None] & m_d, other=0.0
        )
        if WIDEN:
            b_q = b_q.to(tl.float32)
        key_scale = scale
        if k_scale_ptr is not None:
            key_scale *= tl.load(k_scale_ptr + kv_head * K_SCALE_HEAD)
        b_acc, b_sum, b_max = attend_range(
            b_q,
            b_start,
            b_end,
            lo,
            hi,
            k_pool_ptr + kv_head.to(tl.int64) * k_head * STRIDE_UNIT,
            v_pool_ptr + kv_head.to(tl.int64) * v_head * STRIDE_UNIT,
            page_table_ptr + slot * table_slot,
            k_page,
            v_page,
            key_scale,
            softcap,
            STRIDE_UNIT,
            K_ENTRY,
            V_ENTRY,
            D,
            PAGE_SIZE,
            BLOCK_M,
            BLOCK_N,
            SOFTCAP,
            PRECISION,
            READ,
        )
        if sinks_ptr is not None:
            b_sink = tl.load(sinks_ptr + o_head, mask=m_m, other=float("-inf")) * LOG2E
            b_new_max = tl.maximum(b_max, b_sink)
            b_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
            b_decay = tl.exp2(b_max - b_base)
            b_sum = b_sum * b_decay + tl.exp2(b_sink - b_base)
            b_acc = b_acc * b_decay[:, None]
            b_max = b_base
        b_out, b_lse = normalise(b_acc, b_sum, b_max)
        if v_scale_ptr is not None:
            b_out *= tl.load(v_scale_ptr + kv_head * V_SCALE_HEAD)
        o_out = o_place * (KV_HEADS * GROUP) + o_head
        p_out = out_ptr + first.to(tl.int64) * (KV_HEADS * GROUP * D)
        p_lse = lse_ptr + first.to(tl.int64) * (KV_HEADS * GROUP)
        tl.store(p_out + o_out[:, None] * D + o_d[None, :], b_out, mask=m_m[:, None] & m_d)
        tl.store(p_lse + o_out, b_lse * LN2, mask=m_m)
