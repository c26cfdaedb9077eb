r"""Paged attention over latents: one entry per position serves as K and V of all query heads.

    s_n = scale * (q . c_n)            q with W_UK absorbed, c_n the entry of position n
    out = sum_n exp(s_n - lse) c_n[: Dv]                   lse = ln sum_n exp(s_n)

    q             [T, Hq, D]           pool          [num_pages, page_size, D]
    out           [T, Hq, Dv]          lse           [T, Hq] fp32, natural log
    partial_out   [B, S, Q, Hq, Dv]    partial_lse   [B, S, Q, Hq], fp32

Ranges, work lists, splits and their merge are those of `attend`, with one KV head. A *tile* holds
query places of one row times all heads, place by place, cut into blocks of rows; it loads an entry
once, in two parts: the first Dv values (512, say), which are V too, and the rope key (64). So each
dot has a power of two of columns and neither is padded in the geometry that matters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .attend_latent_decode import latent_decode_kernel
from .attend_latent_merge import check_expansion, launch_latent_merge
from .attend_latent_prefill import latent_prefill_kernel
from .attend_launch import (
    check_contiguous_last,
    check_dimensions,
    check_work,
    launch_merge,
    launch_tile,
    precision_constants,
)
from .fp8 import FP8, PLAIN, as_read, check_scale, pool_reading
from .grid import INTERPRETED
from .strides import stride_unit
from .tiles import arch_of, latent_tiles, padded_head_dim


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Sizes that are fixed for an engine's layer: nothing here follows a bucket."""

    heads: int
    dim: int
    value_dim: int
    page_size: int


def attend_latent(
    q: Tensor,
    pool: Tensor,
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
    partial_out: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    decode_query_len: int,
    prefill_block: int,
    latent_scale: Tensor | None = None,
    up: Tensor | None = None,
    expanded: Tensor | None = None,
) -> None:
    """Launch the decode tile, the merge of its splits, and the prefill tile when there are prefill
    items; with `up` the merge comes last and multiplies.

    Shapes and semantics are those of `ops.attend_latent`; q and the pool may have any outer
    strides. Raises `ValueError` that names the argument when a shape, dtype or stride does not fit.
    """
    shape = _shape_of(q, pool, out)
    check_work(
        tokens=q.shape[0],
        heads=shape.heads,
        value_dim=shape.value_dim,
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
    check_scale("latent_scale", latent_scale, (2,), pool)
    check_expansion(out, up, expanded)
    arch = arch_of(q.device)
    tiles = latent_tiles(
        arch,
        head_dim=shape.dim,
        value_dim=shape.value_dim,
        heads=shape.heads,
        decode_query_len=decode_query_len,
        page_size=shape.page_size,
        dtype=q.dtype,
        kv_dtype=pool.dtype,
    )
    reading = pool_reading(pool.dtype, arch)
    pool = as_read(pool, reading)
    strides = (*q.stride()[:2], pool.stride(0))
    unit = stride_unit(strides)
    inputs = (
        q,
        pool,
        latent_scale,
        page_table,
        slot_of_row,
        query_start,
        visible_start,
        visible_end,
    )
    scalars = (scale, *(x // unit for x in strides), page_table.stride(0))
    constants = latent_constants(
        shape,
        q.dtype,
        stride_unit=unit,
        entry=pool.stride(1),
        interpreted=INTERPRETED,
        reading=reading,
    )

    decode = (*inputs, row_begin, row_end, row_chunk, decode_items, decode_count)
    launch_tile(
        latent_decode_kernel,
        (*decode, partial_out, partial_lse, *scalars, decode_query_len, partial_out.shape[1]),
        constants,
        tiles.decode,
    )
    partials = (partial_out, partial_lse, query_start, row_splits)
    if expanded is None:
        launch_merge(*partials, None, out, lse)
    if prefill_items is not None:
        launch_tile(
            latent_prefill_kernel,
            (*inputs, prefill_items, prefill_count, out, lse, *scalars, prefill_block),
            constants,
            tiles.prefill,
        )
    if up is not None and expanded is not None:
        launch_latent_merge(*partials, out, up, expanded)


def latent_constants(
    shape: LatentShape,
    dtype: torch.dtype,
    *,
    stride_unit: int,
    entry: int,
    interpreted: bool,
    reading: int = PLAIN,
) -> dict[str, Any]:
    """Compile-time arguments of both tile kernels, the tile itself aside.

    `entry` is the stride between the entries of a page: known to the compiler, the addresses of a
    block fold into immediates instead of filling registers. `reading` is `pool_reading`'s.
    """
    rope_dim = shape.dim - shape.value_dim
    return {
        "STRIDE_UNIT": stride_unit,
        "ENTRY": entry,
        "HEADS": shape.heads,
        "DV": shape.value_dim,
        "DR": rope_dim,
        "DV_PADDED": padded_head_dim(shape.value_dim),
        "DR_PADDED": padded_head_dim(rope_dim),
        "PAGE_SIZE": shape.page_size,
        "READ": reading,
        **precision_constants(dtype, interpreted=interpreted),
    }


def _shape_of(q: Tensor, pool: Tensor, out: Tensor) -> LatentShape:
    check_dimensions(
        q=(q, "[T, Hq, D]"), pool=(pool, "[num_pages, page_size, D]"), out=(out, "[T, Hq, Dv]")
    )
    heads, dim = q.shape[1:]
    if pool.shape[2] != dim or pool.dtype not in (q.dtype, FP8):
        raise ValueError(
            f"pool: wanted {q.dtype} [num_pages, page_size, {dim}] like q, or {FP8}, "
            f"got {pool.dtype} {tuple(pool.shape)}"
        )
    check_contiguous_last(q=q, pool=pool)
    return LatentShape(heads=heads, dim=dim, value_dim=out.shape[2], page_size=pool.shape[1])
