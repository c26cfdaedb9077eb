r"""Paged attention over visible ranges: decode tile, merge, prefill tile.

Each query token t sees the local KV positions [visible_start[t], visible_end[t]) of its slot,
and that is all a kernel knows: causality, speculation, windows, context parallelism, padding
and chunked prefill are contents of those ranges.

    s_n = scale * (q . k_n)            then softcap * tanh(s_n / softcap) when softcap > 0
    out = sum_n exp(s_n - lse) v_n     lse = ln sum_n exp(s_n)     (one sink joins the sum once)

    q, out        [T, Hq, D]           lse           [T, Hq] fp32, natural log
    k/v_pool      [num_pages, Hkv, page_size, D]     position c of a slot lies in page
                                       page_table[slot, c // page_size] at c % page_size
    partial_out   [B, S, Q, Hq, D]     partial_lse   [B, S, Q, Hq], fp32

A *tile* holds the query places of one row times the query heads of one KV head, so K and V are
read once per row. A fixed number of programs loops over the work list; the KV head and the tile
of an item are innermost. KV blocks start at absolute multiples of BLOCK_N and a tile's shape
never follows a bucket, so a row's result is bitwise the same in every batch and every bucket.

Nothing is loaded outside the union of a tile's visible ranges, which has no gaps: pages beyond
may be unset and entries beyond may hold NaN, and 0 * NaN inside a dot would be NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .grid import INTERPRETED, ResidentGrids
from .strides import stride_unit
from .tiles import Tile, arch_of, attention_tiles, padded_head_dim

_LOG2E = tl.constexpr(math.log2(math.e))
_LN2 = tl.constexpr(math.log(2))
_NO_POSITION = tl.constexpr(2**31 - 1)
_MERGE_ELEMENTS = 4096  # fp32 values of the [S, heads, D] block that one merge iteration holds

_TILE_INTEGERS = [
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
def _visible_ranges(start_ptr, end_ptr, o_t, m_t):
    """Ranges of a tile's rows, (0, 0) where masked, and the union [lo, hi) of the non-empty."""
    b_start = tl.load(start_ptr + o_t, mask=m_t, other=0)
    b_end = tl.load(end_ptr + o_t, mask=m_t, other=0)
    m_seen = b_end > b_start
    lo = tl.min(tl.where(m_seen, b_start, _NO_POSITION), 0)
    hi = tl.max(tl.where(m_seen, b_end, 0), 0)
    return b_start, b_end, lo, hi


@triton.jit
def _attend_range(
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
    WIDEN: tl.constexpr,
):
    """Unnormalised attention of the tile over [lo, hi): sum of p v, sum of p, maximum (base 2)."""
    D_PADDED: tl.constexpr = b_q.shape[1]
    o_d = tl.arange(0, D_PADDED)
    o_block = tl.arange(0, BLOCK_N)
    b_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_M,), tl.float32)
    b_acc = tl.zeros((BLOCK_M, D_PADDED), tl.float32)
    for n in range(lo // BLOCK_N * BLOCK_N, hi, BLOCK_N):
        o_n = n + o_block
        m_n = (o_n >= lo) & (o_n < hi)
        if PAGE_SIZE % BLOCK_N == 0:  # the block lies in one page, and some of it is visible
            page = tl.load(table_ptr + n // PAGE_SIZE).to(tl.int64)
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
        if WIDEN:
            b_k = b_k.to(tl.float32)
            b_v = b_v.to(tl.float32)
        b_s = tl.dot(b_q, b_k, input_precision=PRECISION)  # [M, N]
        if SOFTCAP:
            b_s = _tanh(b_s * (scale / softcap)) * (softcap * _LOG2E)
        else:
            b_s = b_s * (scale * _LOG2E)
        m_s = (o_n[None, :] >= b_start[:, None]) & (o_n[None, :] < b_end[:, None])
        b_s = tl.where(m_s, b_s, float("-inf"))
        b_new_max = tl.maximum(b_max, tl.max(b_s, 1))
        # A row that has seen nothing yet has maximum -inf, and -inf - -inf is NaN.
        b_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_p = tl.exp2(b_s - b_base[:, None])
        b_decay = tl.exp2(b_max - b_base)
        b_sum = b_sum * b_decay + tl.sum(b_p, 1)
        b_acc = b_acc * b_decay[:, None]
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
        b_max = b_new_max
    return b_acc, b_sum, b_max


@triton.jit
def _tanh(x):
    """From exp2 alone, so that the interpreter has it; exact at infinity, NaN stays NaN."""
    e = tl.exp2(tl.abs(x) * (-2.0 * _LOG2E))
    y = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -y, y)


@triton.jit
def _normalise(b_acc, b_sum, b_max):
    """Output and lse in base 2; (0, -inf) where the sum is empty. NaN stays visible as NaN."""
    m_empty = b_sum == 0.0
    b_divisor = tl.where(m_empty, 1.0, b_sum)
    b_lse = tl.where(m_empty, float("-inf"), b_max + tl.log2(b_divisor))
    return b_acc / b_divisor[:, None], b_lse


@triton.jit(do_not_specialize=[*_TILE_INTEGERS, "max_splits"])
def _decode_kernel(
    q_ptr,
    k_pool_ptr,
    v_pool_ptr,
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
        b_start, b_end, lo, hi = _visible_ranges(
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
        b_acc, b_sum, b_max = _attend_range(
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
            scale,
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
            WIDEN,
        )
        b_out, b_lse = _normalise(b_acc, b_sum, b_max)
        split_row = row.to(tl.int64) * max_splits + split
        o_p = (split_row * query_places + o_place) * (KV_HEADS * GROUP) + o_head
        tl.store(partial_out_ptr + o_p[:, None] * D + o_d[None, :], b_out, mask=m_m[:, None] & m_d)
        tl.store(partial_lse_ptr + o_p, b_lse * _LN2, mask=m_m)


@triton.jit(do_not_specialize=["tokens", "rows", "query_places", "max_splits"])
def _merge_kernel(
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


@triton.jit(do_not_specialize=_TILE_INTEGERS)
def _prefill_kernel(
    q_ptr,
    k_pool_ptr,
    v_pool_ptr,
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
        first = tl.load(query_start_ptr + row)
        query_len = tl.load(query_start_ptr + row + 1) - first

        o_m = w % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
        o_place = block * query_places + o_m // GROUP
        o_head = kv_head * GROUP + o_m % GROUP
        m_m = (o_m < query_places * GROUP) & (o_place < query_len)
        b_start, b_end, lo, hi = _visible_ranges(
            visible_start_ptr + first, visible_end_ptr + first, o_place, m_m
        )
        o_token = (first + o_place).to(tl.int64)
        o_q = o_token * q_token + o_head * q_head
        b_q = tl.load(
            q_ptr + o_q[:, None] * STRIDE_UNIT + o_d[None, :], mask=m_m[:, None] & m_d, other=0.0
        )
        if WIDEN:
            b_q = b_q.to(tl.float32)
        b_acc, b_sum, b_max = _attend_range(
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
            scale,
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
            WIDEN,
        )
        if sinks_ptr is not None:
            b_sink = tl.load(sinks_ptr + o_head, mask=m_m, other=float("-inf")) * _LOG2E
            b_new_max = tl.maximum(b_max, b_sink)
            b_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
            b_decay = tl.exp2(b_max - b_base)
            b_sum = b_sum * b_decay + tl.exp2(b_sink - b_base)
            b_acc = b_acc * b_decay[:, None]
            b_max = b_base
        b_out, b_lse = _normalise(b_acc, b_sum, b_max)
        o_out = o_token * (KV_HEADS * GROUP) + o_head
        tl.store(out_ptr + o_out[:, None] * D + o_d[None, :], b_out, mask=m_m[:, None] & m_d)
        tl.store(lse_ptr + o_out, b_lse * _LN2, mask=m_m)


_grids = ResidentGrids()


def attend(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    slot_of_row: Tensor,
    query_start: Tensor,
    visible_start: Tensor,
    visible_end: Tensor,
    row_begin: Tensor,
    row_end: Tensor,
    row_chunk: Tensor,
    row_splits: Tensor,
    decode_items: Tensor,
    decode_count: Tensor,
    prefill_items: Tensor | None,
    prefill_count: Tensor | None,
    sinks: Tensor | None,
    partial_out: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float,
    decode_query_len: int,
    prefill_block: int,
) -> None:
    """Launch the decode tile and its merge, then the prefill tile when there are prefill items.

    Shapes and semantics are those of `ops.attend`; q and the pools may have any outer strides.
    Raises `ValueError` that names the argument when a shape, dtype or stride does not fit.
    """
    shape = _shape_of(q, k_pool, partial_out, decode_query_len)
    _check_pools(shape, q, k_pool, v_pool, page_table)
    batch, tokens, heads = shape.batch, q.shape[0], shape.heads
    splits = shape.max_splits
    int32, fp32 = torch.int32, torch.float32
    for name, tensor, wanted, dtype in (
        ("slot_of_row", slot_of_row, (batch,), int32),
        ("query_start", query_start, (batch + 1,), int32),
        ("visible_start", visible_start, (tokens,), int32),
        ("visible_end", visible_end, (tokens,), int32),
        ("row_begin", row_begin, (batch,), int32),
        ("row_end", row_end, (batch,), int32),
        ("row_chunk", row_chunk, (batch,), int32),
        ("row_splits", row_splits, (batch,), int32),
        ("decode_items", decode_items, (batch * splits, 2), int32),
        ("decode_count", decode_count, (1,), int32),
        ("partial_out", partial_out, (batch, splits, decode_query_len, heads, shape.dim), fp32),
        ("partial_lse", partial_lse, (batch, splits, decode_query_len, heads), fp32),
        ("out", out, (tokens, heads, shape.dim), q.dtype),
        ("lse", lse, (tokens, heads), fp32),
    ):
        _check(name, tensor, wanted, dtype)
    if sinks is not None:
        _check("sinks", sinks, (heads,), fp32)
    if (prefill_items is None) != (prefill_count is None):
        raise ValueError("prefill_items: wanted together with prefill_count, or neither")
    if prefill_items is not None and prefill_count is not None:
        _check("prefill_items", prefill_items, (prefill_items.shape[0], 2), int32)
        _check("prefill_count", prefill_count, (1,), int32)
    if prefill_block < 1:
        raise ValueError(f"prefill_block: wanted at least 1, got {prefill_block}")
    tiles = attention_tiles(
        arch_of(q.device),
        head_dim=shape.dim,
        group=shape.group,
        decode_query_len=decode_query_len,
        page_size=shape.page_size,
        dtype=q.dtype,
    )
    strides = (*q.stride()[:2], *k_pool.stride()[:2], *v_pool.stride()[:2])
    unit = stride_unit(strides)
    inputs = (q, k_pool, v_pool, page_table, slot_of_row, query_start, visible_start, visible_end)
    scalars = (scale, softcap, *(x // unit for x in strides), page_table.stride(0))
    constants = {
        "STRIDE_UNIT": unit,
        "K_ENTRY": k_pool.stride(2),
        "V_ENTRY": v_pool.stride(2),
        "SOFTCAP": softcap > 0,
        **shape.constants(q.dtype),
    }

    decode = (*inputs, row_begin, row_end, row_chunk, decode_items, decode_count)
    _launch(
        _decode_kernel,
        (*decode, partial_out, partial_lse, *scalars, decode_query_len, splits),
        {**constants, **_tile_constants(tiles.decode)},
    )
    merge = (partial_out, partial_lse, query_start, row_splits, sinks, out, lse)
    _launch(
        _merge_kernel,
        (*merge, tokens, batch, decode_query_len, splits),
        merge_constants(heads, shape.dim, splits),
    )
    if prefill_items is None:
        return
    _launch(
        _prefill_kernel,
        (*inputs, prefill_items, prefill_count, sinks, out, lse, *scalars, prefill_block),
        {**constants, **_tile_constants(tiles.prefill)},
    )


@dataclass(frozen=True, slots=True)
class _Shape:
    """Sizes that are fixed for an engine's layer: nothing here follows a bucket."""

    batch: int
    max_splits: int
    heads: int
    kv_heads: int
    dim: int
    page_size: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    def constants(self, dtype: torch.dtype) -> dict[str, Any]:
        wide = dtype == torch.float32
        return {
            "KV_HEADS": self.kv_heads,
            "GROUP": self.group,
            "D": self.dim,
            "D_PADDED": padded_head_dim(self.dim),
            "PAGE_SIZE": self.page_size,
            # fp32 on tensor cores keeps nearly its precision as three tf32 products.
            "PRECISION": "tf32x3" if wide and not INTERPRETED else "ieee",
            # The interpreter holds bf16 as raw integers: it must be fp32 before any arithmetic.
            "WIDEN": INTERPRETED and not wide,
        }


def merge_constants(heads: int, head_dim: int, max_splits: int) -> dict[str, Any]:
    """Compiled shape of the merge: as many heads at once as `_MERGE_ELEMENTS` values allow."""
    padded, splits = padded_head_dim(head_dim), triton.next_power_of_2(max_splits)
    fitting = max(1, _MERGE_ELEMENTS // (splits * padded))
    return {
        "HEADS": heads,
        "D": head_dim,
        "D_PADDED": padded,
        "BLOCK_S": splits,
        "BLOCK_H": min(fitting, triton.next_power_of_2(heads)),
        "num_warps": 4,
    }


def _tile_constants(tile: Tile) -> dict[str, Any]:
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def _launch(kernel: Any, args: Sequence[Any], constants: Mapping[str, Any]) -> None:
    programs = _grids.programs(kernel, args[0].device, args, constants)
    kernel[(programs,)](*args, **constants)


def _shape_of(q: Tensor, k_pool: Tensor, partial_out: Tensor, decode_query_len: int) -> _Shape:
    for name, tensor, wanted in (
        ("q", q, "[T, Hq, D]"),
        ("k_pool", k_pool, "[num_pages, Hkv, page_size, D]"),
        ("partial_out", partial_out, "[B, S, decode_query_len, Hq, D]"),
    ):
        if tensor.dim() != wanted.count(",") + 1:
            raise ValueError(f"{name}: wanted {wanted}, got shape {tuple(tensor.shape)}")
    heads, kv_heads = q.shape[1], k_pool.shape[1]
    if heads % kv_heads:
        raise ValueError(f"q: wanted a multiple of {kv_heads} heads, got {heads}")
    if decode_query_len < 1:
        raise ValueError(f"decode_query_len: wanted at least 1, got {decode_query_len}")
    return _Shape(
        batch=partial_out.shape[0],
        max_splits=partial_out.shape[1],
        heads=heads,
        kv_heads=kv_heads,
        dim=q.shape[2],
        page_size=k_pool.shape[2],
    )


def _check_pools(
    shape: _Shape, q: Tensor, k_pool: Tensor, v_pool: Tensor, page_table: Tensor
) -> None:
    wanted = (k_pool.shape[0], shape.kv_heads, shape.page_size, shape.dim)
    for name, tensor in (("k_pool", k_pool), ("v_pool", v_pool)):
        if tensor.shape != wanted:
            raise ValueError(f"{name}: wanted shape {wanted}, got {tuple(tensor.shape)}")
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name}: wanted q's dtype {q.dtype}, got {tensor.dtype}")
    for name, tensor in (("q", q), ("k_pool", k_pool), ("v_pool", v_pool)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name}: wanted a contiguous last dimension, got {tensor.stride()}")
    if page_table.dim() != 2 or page_table.dtype != torch.int32 or page_table.stride(1) != 1:
        raise ValueError(
            "page_table: wanted int32 [slots, columns] with contiguous rows, "
            f"got {page_table.dtype} {tuple(page_table.shape)}"
        )


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: wanted contiguous {dtype} {list(shape)}, "
            f"got {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"
        )
