"""Decode rows of `attend`: partials of each split, and their merge."""

from __future__ import annotations

import triton
import triton.language as tl

from .attend_tile import LN2, TILE_INTEGERS, attend_range, normalise, visible_ranges


@triton.jit(do_not_specialize=[*TILE_INTEGERS, "max_splits"])
def decode_kernel(
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
    row_begin_ptr,
    row_end_ptr,
    row_chunk_ptr,
    items_ptr,
    count_ptr,
    partial_out_ptr,
    partial_lse_ptr,
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
    max_splits,
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
    """Items (row, split): attention over [begin + split * chunk, ... + chunk) of the row."""
    tiles = tl.cdiv(query_places * GROUP, BLOCK_M)
    total = tl.load(count_ptr) * (KV_HEADS * tiles)
    o_d = tl.arange(0, D_PADDED)
    m_d = (o_d < D)[None, :]
    for w in range(tl.program_id(0), total, tl.num_programs(0)):
        item = w // (KV_HEADS * tiles)
        kv_head = w // tiles % KV_HEADS
        row = tl.load(items_ptr + item * 2)
        split = tl.load(items_ptr + item * 2 + 1)
        slot = tl.load(slot_of_row_ptr + row).to(tl.int64)
        first = tl.load(query_start_ptr + row)
        query_len = tl.load(query_start_ptr + row + 1) - first

        o_m = w % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
        o_place = o_m // GROUP
        o_head = kv_head * GROUP + o_m % GROUP
        m_m = o_place < tl.minimum(query_len, query_places)
        b_start, b_end, lo, hi = visible_ranges(
            visible_start_ptr + first, visible_end_ptr + first, o_place, m_m
        )
        chunk = tl.load(row_chunk_ptr + row)
        begin = tl.load(row_begin_ptr + row) + split * chunk
        lo = tl.maximum(lo, begin)
        hi = tl.minimum(hi, tl.minimum(begin + chunk, tl.load(row_end_ptr + row)))

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
        b_out, b_lse = normalise(b_acc, b_sum, b_max)
        if v_scale_ptr is not None:
            b_out *= tl.load(v_scale_ptr + kv_head * V_SCALE_HEAD)
        o_p = o_place * (KV_HEADS * GROUP) + o_head
        first_p = (row.to(tl.int64) * max_splits + split) * query_places * (KV_HEADS * GROUP)
        p_out = partial_out_ptr + first_p * D
        tl.store(p_out + o_p[:, None] * D + o_d[None, :], b_out, mask=m_m[:, None] & m_d)
        tl.store(partial_lse_ptr + first_p + o_p, b_lse * LN2, mask=m_m)


@triton.jit(do_not_specialize=["tokens", "rows", "query_places", "max_splits"])
def merge_kernel(
    partial_out_ptr,
    partial_lse_ptr,
    query_start_ptr,
    row_splits_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    tokens,
    rows,
    query_places,
    max_splits,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Union of a decode row's splits; zeros and -inf at the places past the last row."""
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    o_s = tl.arange(0, BLOCK_S)
    o_d = tl.arange(0, D_PADDED)
    m_d = o_d < D
    for w in range(tl.program_id(0), rows * query_places * HEAD_BLOCKS, tl.num_programs(0)):
        o_h = w % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
        m_h = o_h < HEADS
        place = w // HEAD_BLOCKS % query_places
        row = w // HEAD_BLOCKS // query_places
        first = tl.load(query_start_ptr + row)
        splits = tl.load(row_splits_ptr + row)  # 0: not a decode row, its places are not ours
        if (splits > 0) & (place < tl.load(query_start_ptr + row + 1) - first):
            o_split = row.to(tl.int64) * max_splits + o_s
            o_p = (o_split * query_places + place)[:, None] * HEADS + o_h[None, :]  # [S, H]
            m_p = (o_s < splits)[:, None] & m_h[None, :]
            b_lse = tl.load(partial_lse_ptr + o_p, mask=m_p, other=float("-inf"))
            b_out = tl.load(
                partial_out_ptr + o_p[:, :, None] * D + o_d[None, None, :],
                mask=m_p[:, :, None] & m_d[None, None, :],
                other=0.0,
            )
            b_max = tl.max(b_lse, 0)
            if sinks_ptr is not None:
                b_sink = tl.load(sinks_ptr + o_h, mask=m_h, other=float("-inf"))
                b_max = tl.maximum(b_max, b_sink)
            b_base = tl.where(b_max == float("-inf"), 0.0, b_max)
            b_weight = tl.exp(b_lse - b_base[None, :])
            b_sum = tl.sum(b_weight, 0)
            if sinks_ptr is not None:
                b_sum += tl.exp(b_sink - b_base)
            m_empty = b_sum == 0.0
            b_divisor = tl.where(m_empty, 1.0, b_sum)
            b_out = tl.sum(b_out * b_weight[:, :, None], 0) / b_divisor[:, None]
            b_lse = tl.where(m_empty, float("-inf"), b_base + tl.log(b_divisor))
            o_out = (first + place).to(tl.int64) * HEADS + o_h
            m_out = m_h[:, None] & m_d[None, :]
            tl.store(out_ptr + o_out[:, None] * D + o_d[None, :], b_out, mask=m_out)
            tl.store(lse_ptr + o_out, b_lse, mask=m_h)
    used = tl.load(query_start_ptr + rows)
    for w in range(tl.program_id(0), (tokens - used) * HEAD_BLOCKS, tl.num_programs(0)):
        o_h = w % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
        m_h = o_h < HEADS
        o_out = (used + w // HEAD_BLOCKS).to(tl.int64) * HEADS + o_h
        b_zero = tl.zeros((BLOCK_H, D_PADDED), tl.float32)
        m_out = m_h[:, None] & m_d[None, :]
        tl.store(out_ptr + o_out[:, None] * D + o_d[None, :], b_zero, mask=m_out)
        b_empty = tl.full((BLOCK_H,), float("-inf"), tl.float32)
        tl.store(lse_ptr + o_out, b_empty, mask=m_h)
