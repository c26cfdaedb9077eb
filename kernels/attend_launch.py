"""What the launchers of `attend` and `attend_latent` share: checks, grids, the merge of splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from .attend_decode import merge_kernel
from .grid import ResidentGrids
from .tiles import Tile, padded_head_dim

_MERGE_ELEMENTS = 4096  # fp32 values of the [S, heads, D] block that one merge iteration holds

_grids = ResidentGrids()


def check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise `ValueError` unless `tensor` is contiguous and has this shape and dtype."""
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: wanted contiguous {dtype} {list(shape)}, "
            f"got {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"
        )


def check_dimensions(**tensors: tuple[Tensor, str]) -> None:
    """Raise `ValueError` for a tensor that lacks the dimensions of its layout, say "[T, H, D]"."""
    for name, (tensor, layout) in tensors.items():
        if tensor.dim() != layout.count(",") + 1:
            raise ValueError(f"{name}: wanted {layout}, got shape {tuple(tensor.shape)}")


def check_contiguous_last(**tensors: Tensor) -> None:
    """Raise `ValueError` for a tensor whose last dimension is strided."""
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name}: wanted a contiguous last dimension, got {tensor.stride()}")


def check_work(
    *,
    tokens: int,
    heads: int,
    value_dim: int,
    dtype: torch.dtype,
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
    decode_query_len: int,
    prefill_block: int,
) -> None:
    """Check the metadata, the partials and the outputs; B and S are those of `partial_out`.

    Raises `ValueError` that names the argument when a shape, dtype or stride does not fit.
    """
    if decode_query_len < 1:
        raise ValueError(f"decode_query_len: wanted at least 1, got {decode_query_len}")
    check_dimensions(partial_out=(partial_out, "[B, S, decode_query_len, Hq, Dv]"))
    if page_table.dim() != 2 or page_table.dtype != torch.int32 or page_table.stride(1) != 1:
        raise ValueError(
            "page_table: wanted int32 [slots, columns] with contiguous rows, "
            f"got {page_table.dtype} {tuple(page_table.shape)}"
        )
    batch, splits = partial_out.shape[:2]
    int32, fp32 = torch.int32, torch.float32
    for name, tensor, wanted, kind in (
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
        ("partial_out", partial_out, (batch, splits, decode_query_len, heads, value_dim), fp32),
        ("partial_lse", partial_lse, (batch, splits, decode_query_len, heads), fp32),
        ("out", out, (tokens, heads, value_dim), dtype),
        ("lse", lse, (tokens, heads), fp32),
    ):
        check_tensor(name, tensor, wanted, kind)
    if (prefill_items is None) != (prefill_count is None):
        raise ValueError("prefill_items: wanted together with prefill_count, or neither")
    if prefill_items is not None and prefill_count is not None:
        check_tensor("prefill_items", prefill_items, (prefill_items.shape[0], 2), int32)
        check_tensor("prefill_count", prefill_count, (1,), int32)
    if prefill_block < 1:
        raise ValueError(f"prefill_block: wanted at least 1, got {prefill_block}")


def launch_tile(kernel: Any, args: Sequence[Any], constants: Mapping[str, Any], tile: Tile) -> None:
    """Launch a tile kernel with as many programs as are resident together."""
    blocks = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
    _launch(kernel, args, {**constants, **blocks}, tile.num_warps, tile.num_stages)


def launch_merge(
    partial_out: Tensor,
    partial_lse: Tensor,
    query_start: Tensor,
    row_splits: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Join the splits of decode rows; write zeros and -inf to places past the last row."""
    batch, splits, query_len, heads, dim = partial_out.shape
    args = (partial_out, partial_lse, query_start, row_splits, sinks, out, lse)
    sizes = (out.shape[0], batch, query_len, splits)
    _launch(merge_kernel, (*args, *sizes), merge_constants(heads, dim, splits))


def merge_constants(heads: int, dim: int, max_splits: int) -> dict[str, Any]:
    """Compiled shape of the merge: as many heads at once as `_MERGE_ELEMENTS` values allow."""
    padded, splits = padded_head_dim(dim), triton.next_power_of_2(max_splits)
    fitting = max(1, _MERGE_ELEMENTS // (splits * padded))
    return {
        "HEADS": heads,
        "D": dim,
        "D_PADDED": padded,
        "BLOCK_S": splits,
        "BLOCK_H": min(fitting, triton.next_power_of_2(heads)),
    }


def precision_constants(dtype: torch.dtype, *, interpreted: bool) -> dict[str, Any]:
    """Compile-time arguments that say how a tile kernel multiplies values of `dtype`."""
    wide = dtype == torch.float32
    return {
        # fp32 on tensor cores keeps nearly its precision as three tf32 products.
        "PRECISION": "tf32x3" if wide and not interpreted else "ieee",
        # The interpreter holds bf16 as raw integers: it must be fp32 before any arithmetic.
        "WIDEN": interpreted and not wide,
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
