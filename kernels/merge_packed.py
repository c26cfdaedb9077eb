"""Merging packed partials of all ranks, on the device: see `ops.merge_packed`.

    merged = sum_w out_w * exp(lse_w - base) / divisor        (base and divisor: see `partials`)

One program per tile of rows. A message row starts at any multiple of 4 bytes, so its values come
in loads of 4 bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import check_contiguous
from .message import lse_column
from .partials import load_sinks, rows_per_program, union_weights

RANKS_TOGETHER = tl.constexpr(4)  # ranks whose loads are in flight together; more would spill


@triton.jit(do_not_specialize=["rows", "first_row"])
def merge_packed_kernel(  # noqa: D103
    message_ptr,
    packed_lse_ptr,
    sinks_ptr,
    merged_ptr,
    rows,
    first_row,
    SINKS: tl.constexpr,
    RANKS: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    MESSAGE_ROW: tl.constexpr,  # values
    LSE_ROW: tl.constexpr,  # fp32 words
    BLOCK: tl.constexpr,
):
    o_row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_row = o_row < rows
    b_sink = load_sinks(sinks_ptr, (first_row + o_row) % SINKS, m_row)
    o_row = o_row.to(tl.int64)
    o_d = tl.arange(0, D_PADDED)
    m = m_row[:, None] & (o_d < D)[None, :]  # [BLOCK, D_PADDED]

    p_lse = packed_lse_ptr + o_row * LSE_ROW
    lse_rank = rows.to(tl.int64) * LSE_ROW
    b_base, b_divisor = union_weights(p_lse, lse_rank, b_sink, m_row, RANKS)
    p_out = message_ptr + o_row[:, None] * MESSAGE_ROW + o_d[None, :]
    out_rank = rows.to(tl.int64) * MESSAGE_ROW
    b_merged = tl.zeros([BLOCK, D_PADDED], tl.float32)
    for w in tl.range(RANKS, loop_unroll_factor=RANKS_TOGETHER):
        b_lse = tl.load(p_lse + w * lse_rank, mask=m_row, other=float("-inf"))
        b_out = tl.load(p_out + w * out_rank, mask=m, other=0.0).to(tl.float32)
        # Selected, not multiplied away: an unwritten row of an empty shard may hold NaN.
        b_out = tl.where((b_lse == float("-inf"))[:, None], 0.0, b_out)
        b_merged += b_out * tl.exp(b_lse - b_base)[:, None]
    p_merged = merged_ptr + o_row[:, None] * D + o_d[None, :]
    tl.store(p_merged, b_merged / b_divisor[:, None], mask=m)


def merge_packed(message: Tensor, sinks: Tensor | None, merged: Tensor, first_row: int) -> None:
    """Write merged [n, D], the attention over all ranks, from message [W, n, D + 4 / itemsize].

    Row i belongs to sink (first_row + i) % len(sinks). Raises `ValueError` that names the argument
    when shapes, dtypes or strides do not fit.
    """
    _check(message, sinks, merged)
    rows, dim = merged.shape
    if rows == 0:
        return
    packed_lse = lse_column(message, dim)
    block = rows_per_program(dim)
    merge_packed_kernel[(triton.cdiv(rows, block),)](
        message,
        packed_lse,
        sinks,
        merged,
        rows,
        first_row,
        SINKS=1 if sinks is None else len(sinks),
        RANKS=message.shape[0],
        D=dim,
        D_PADDED=triton.next_power_of_2(dim),
        MESSAGE_ROW=message.shape[2],
        LSE_ROW=packed_lse.stride(1),
        BLOCK=block,
        num_warps=4,
    )


def _check(message: Tensor, sinks: Tensor | None, merged: Tensor) -> None:
    if merged.dim() != 2:
        raise ValueError(f"merged: wanted [n, D], got shape {tuple(merged.shape)}")
    rows, dim = merged.shape
    lse_column(message, dim)
    if message.shape[1] != rows:
        raise ValueError(f"merged: wanted {message.shape[1]} rows as the message has, got {rows}")
    check_contiguous(message.dtype, message=message, merged=merged)
    if sinks is not None:
        check_contiguous(torch.float32, sinks=sinks)
        if sinks.dim() != 1 or len(sinks) == 0:
            raise ValueError(f"sinks: wanted [heads], got shape {tuple(sinks.shape)}")
