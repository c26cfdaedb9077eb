"""Packing partial attention into one message per rank, on the device: see `ops.pack_partial`.

One program per tile of message rows, so that rows past the end are written too. The LSE is stored
through a second pointer to the message's storage, as fp32: see `message`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import check_contiguous
from .message import lse_column
from .partials import rows_per_program, source_row


@triton.jit(do_not_specialize=["tokens", "rows"])
def pack_kernel(  # noqa: D103
    out_ptr,
    lse_ptr,
    message_ptr,
    packed_lse_ptr,
    tokens,
    rows,
    HEADS: tl.constexpr,
    SLICES: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    MESSAGE_ROW: tl.constexpr,  # values
    LSE_ROW: tl.constexpr,  # fp32 words
    BLOCK: tl.constexpr,
):
    o_row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_row = o_row < rows
    m_source = o_row < tokens * HEADS
    o_source = source_row(o_row, tokens, HEADS, SLICES).to(tl.int64)
    o_row = o_row.to(tl.int64)
    o_d = tl.arange(0, D_PADDED)
    m_d = (o_d < D)[None, :]

    b_lse = tl.load(lse_ptr + o_source, mask=m_source, other=float("-inf"))
    p_out = out_ptr + o_source[:, None] * D + o_d[None, :]
    b_out = tl.load(p_out, mask=m_source[:, None] & m_d, other=0.0)  # [BLOCK, D_PADDED]
    p_message = message_ptr + o_row[:, None] * MESSAGE_ROW + o_d[None, :]
    tl.store(p_message, b_out, mask=m_row[:, None] & m_d)
    tl.store(packed_lse_ptr + o_row * LSE_ROW, b_lse, mask=m_row)


def pack_partial(out: Tensor, lse: Tensor, message: Tensor, by_head: bool) -> None:
    """Write out [T, H, D] and lse [T, H] (fp32) as message [W, n, D + 4 / itemsize].

    by_head sends a share of the heads to each rank, else a share of the rows. Raises `ValueError`
    that names the argument when shapes, dtypes or strides do not fit.
    """
    _check(out, lse, message, by_head)
    tokens, heads, dim = out.shape
    if tokens == 0:
        return
    packed_lse = lse_column(message, dim)
    ranks, rows, width = message.shape
    block = rows_per_program(dim)
    pack_kernel[(triton.cdiv(ranks * rows, block),)](
        out,
        lse,
        message,
        packed_lse,
        tokens,
        ranks * rows,
        HEADS=heads,
        SLICES=ranks if by_head else 1,
        D=dim,
        D_PADDED=triton.next_power_of_2(dim),
        MESSAGE_ROW=width,
        LSE_ROW=packed_lse.stride(1),
        BLOCK=block,
        num_warps=4,
    )


def _check(out: Tensor, lse: Tensor, message: Tensor, by_head: bool) -> None:
    if out.dim() != 3:
        raise ValueError(f"out: wanted [T, H, D], got shape {tuple(out.shape)}")
    tokens, heads, dim = out.shape
    lse_column(message, dim)
    ranks, rows, _ = message.shape
    if lse.shape != (tokens, heads):
        raise ValueError(f"lse: wanted [{tokens}, {heads}], got shape {tuple(lse.shape)}")
    if by_head and heads % ranks:
        raise ValueError(
            f"message: wanted a number of ranks that divides {heads} heads, got {ranks}"
        )
    if rows != triton.cdiv(tokens * heads, ranks):
        raise ValueError(
            f"message: wanted {triton.cdiv(tokens * heads, ranks)} rows for each of {ranks} ranks, "
            f"got {rows}"
        )
    check_contiguous(out.dtype, out=out, message=message)
    check_contiguous(torch.float32, lse=lse)
