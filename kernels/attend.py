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
read once per row. The scales of FP8 entries are common to a KV head: they multiply scores and
outputs, not entries. A fixed number of programs loops over the work list; the KV head and the tile
of an item are innermost. KV blocks start at absolute multiples of BLOCK_N and a tile's shape
never follows a bucket, so a row's result is bitwise the same in every batch and every bucket.

Nothing is loaded outside the union of a tile's visible ranges, which has no gaps: pages beyond
may be unset and entries beyond may hold NaN, and 0 * NaN inside a dot would be NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .attend_decode import decode_kernel
from .attend_launch import (
    check_contiguous_last,
    check_dimensions,
    check_tensor,
    check_work,
    launch_merge,
    launch_tile,
    precision_constants,
)
from .attend_prefill import prefill_kernel
from .fp8 import FP8, PLAIN, as_read, check_scale, pool_reading, scale_step
from .grid import INTERPRETED
from .strides import stride_unit
from .tiles import arch_of, attention_tiles, padded_head_dim


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes that are fixed for an engine's layer: nothing here follows a bucket."""

    heads: int
    kv_heads: int
    dim: int
    page_size: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads


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
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Launch the decode tile and its merge, then the prefill tile when there are prefill items.

    Shapes and semantics are those of `ops.attend`; q and the pools may have any outer strides.
    Raises `ValueError` that names the argument when a shape, dtype or stride does not fit.
    """
    shape = _shape_of(q, k_pool)
    _check_pools(shape, q, k_pool, v_pool)
    check_work(
        tokens=q.shape[0],
        heads=shape.heads,
        value_dim=shape.dim,
        dtype=q.dtype,
        page_table=page_table,
        slot_of_row=slot_of_row,
        query_start=query_start,
        visible_start=visible_start,
        visible_end=visible_end,
        row_begin=row_begin,
        row_end=row_end,
        row_chunk=row_chunk,
        row_splits=row_splits,
        decode_items=decode_items,
        decode_count=decode_count,
        prefill_items=prefill_items,
        prefill_count=prefill_count,
        partial_out=partial_out,
        partial_lse=partial_lse,
        out=out,
        lse=lse,
        decode_query_len=decode_query_len,
        prefill_block=prefill_block,
    )
    for name, factor in (("k_scale", k_scale), ("v_scale", v_scale)):
        check_scale(name, factor, (1, shape.kv_heads), k_pool)
    if sinks is not None:
        check_tensor("sinks", sinks, (shape.heads,), torch.float32)
    arch = arch_of(q.device)
    tiles = attention_tiles(
        arch,
        head_dim=shape.dim,
        group=shape.group,
        decode_query_len=decode_query_len,
        page_size=shape.page_size,
        dtype=q.dtype,
        kv_dtype=k_pool.dtype,
    )
    reading = pool_reading(k_pool.dtype, arch)
    k_pool, v_pool = as_read(k_pool, reading), as_read(v_pool, reading)
    strides = (*q.stride()[:2], *k_pool.stride()[:2], *v_pool.stride()[:2])
    unit = stride_unit(strides)
    rows = (page_table, slot_of_row, query_start, visible_start, visible_end)
    inputs = (q, k_pool, v_pool, k_scale, v_scale, *rows)
    scalars = (scale, softcap, *(x // unit for x in strides), page_table.stride(0))
    constants = tile_constants(
        shape,
        q.dtype,
        stride_unit=unit,
        entries=(k_pool.stride(2), v_pool.stride(2)),
        softcap=softcap > 0,
        interpreted=INTERPRETED,
        reading=reading,
        scale_steps=(scale_step(k_scale), scale_step(v_scale)),
    )

    decode = (*inputs, row_begin, row_end, row_chunk, decode_items, decode_count)
    launch_tile(
        decode_kernel,
        (*decode, partial_out, partial_lse, *scalars, decode_query_len, partial_out.shape[1]),
        constants,
        tiles.decode,
    )
    launch_merge(partial_out, partial_lse, query_start, row_splits, sinks, out, lse)
    if prefill_items is None:
        return
    launch_tile(
        prefill_kernel,
        (*inputs, prefill_items, prefill_count, sinks, out, lse, *scalars, prefill_block),
        constants,
        tiles.prefill,
    )


def tile_constants(
    shape: Shape,
    dtype: torch.dtype,
    *,
    stride_unit: int,
    entries: tuple[int, int],
    softcap: bool,
    interpreted: bool,
    reading: int = PLAIN,
    scale_steps: tuple[int, int] = (0, 0),
) -> dict[str, Any]:
    """Compile-time arguments of both tile kernels, the tile itself aside.

    `entries` are the strides between the entries of a page in the K and the V pool: known to the
    compiler, the addresses of a block fold into immediates instead of filling registers.
    `reading` and `scale_steps` of FP8 pools are `pool_reading`'s and `scale_step`'s.
    """
    return {
        "STRIDE_UNIT": stride_unit,
        "K_ENTRY": entries[0],
        "V_ENTRY": entries[1],
        "KV_HEADS": shape.kv_heads,
        "GROUP": shape.group,
        "D": shape.dim,
        "D_PADDED": padded_head_dim(shape.dim),
        "PAGE_SIZE": shape.page_size,
        "SOFTCAP": softcap,
        "READ": reading,
        "K_SCALE_HEAD": scale_steps[0],
        "V_SCALE_HEAD": scale_steps[1],
        **precision_constants(dtype, interpreted=interpreted),
    }


def _shape_of(q: Tensor, k_pool: Tensor) -> Shape:
    check_dimensions(q=(q, "[T, Hq, D]"), k_pool=(k_pool, "[num_pages, Hkv, page_size, D]"))
    heads, kv_heads = q.shape[1], k_pool.shape[1]
    if heads % kv_heads:
        raise ValueError(f"q: wanted a multiple of {kv_heads} heads, got {heads}")
    return Shape(heads=heads, kv_heads=kv_heads, dim=q.shape[2], page_size=k_pool.shape[2])


def _check_pools(shape: Shape, q: Tensor, k_pool: Tensor, v_pool: Tensor) -> None:
    wanted = (k_pool.shape[0], shape.kv_heads, shape.page_size, shape.dim)
    for name, tensor in (("k_pool", k_pool), ("v_pool", v_pool)):
        if tensor.shape != wanted:
            raise ValueError(f"{name}: wanted shape {wanted}, got {tuple(tensor.shape)}")
        if tensor.dtype != k_pool.dtype or tensor.dtype not in (q.dtype, FP8):
            raise ValueError(
                f"{name}: wanted q's dtype {q.dtype}, or {FP8} in both pools, got {tensor.dtype}"
            )
    check_contiguous_last(q=q, k_pool=k_pool, v_pool=v_pool)
