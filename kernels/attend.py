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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from .attend_decode import decode_kernel, merge_kernel
from .attend_prefill import prefill_kernel
from .grid import INTERPRETED, ResidentGrids
from .strides import stride_unit
from .tiles import Tile, arch_of, attention_tiles, padded_head_dim

_MERGE_ELEMENTS = 4096  # fp32 values of the [S, heads, D] block that one merge iteration holds

_grids = ResidentGrids()


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes that are fixed for an engine's layer: nothing here follows a bucket."""

    batch: int
    max_splits: int
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
    constants = tile_constants(
        shape,
        q.dtype,
        stride_unit=unit,
        entries=(k_pool.stride(2), v_pool.stride(2)),
        softcap=softcap > 0,
        interpreted=INTERPRETED,
    )

    decode = (*inputs, row_begin, row_end, row_chunk, decode_items, decode_count)
    _launch_tile(
        decode_kernel,
        (*decode, partial_out, partial_lse, *scalars, decode_query_len, splits),
        constants,
        tiles.decode,
    )
    merge = (partial_out, partial_lse, query_start, row_splits, sinks, out, lse)
    _launch(
        merge_kernel,
        (*merge, tokens, batch, decode_query_len, splits),
        merge_constants(heads, shape.dim, splits),
    )
    if prefill_items is None:
        return
    _launch_tile(
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
) -> dict[str, Any]:
    """Compile-time arguments of both tile kernels, the tile itself aside.

    `entries` are the strides between the entries of a page in the K and the V pool: known to the
    compiler, the addresses of a block fold into immediates instead of filling registers.
    """
    wide = dtype == torch.float32
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
        # fp32 on tensor cores keeps nearly its precision as three tf32 products.
        "PRECISION": "tf32x3" if wide and not interpreted else "ieee",
        # The interpreter holds bf16 as raw integers: it must be fp32 before any arithmetic.
        "WIDEN": interpreted and not wide,
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
    }


def _launch(
    kernel: Any,
    args: Sequence[Any],
    constants: Mapping[str, Any],
    num_warps: int = 4,
    num_stages: int = 3,
) -> None:
    # The default of fp fusion is about to differ between releases.
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    constants = {**constants, **options}
    programs = _grids.programs(kernel, args[0].device, args, constants)
    kernel[(programs,)](*args, **constants)


def _launch_tile(
    kernel: Any, args: Sequence[Any], constants: Mapping[str, Any], tile: Tile
) -> None:
    blocks = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
    _launch(kernel, args, {**constants, **blocks}, tile.num_warps, tile.num_stages)


def _shape_of(q: Tensor, k_pool: Tensor, partial_out: Tensor, decode_query_len: int) -> Shape:
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
    return Shape(
        batch=partial_out.shape[0],
        max_splits=partial_out.shape[1],
        heads=heads,
        kv_heads=kv_heads,
        dim=q.shape[2],
        page_size=k_pool.shape[2],
    )


def _check_pools(
    shape: Shape, q: Tensor, k_pool: Tensor, v_pool: Tensor, page_table: Tensor
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
