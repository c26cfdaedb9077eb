"""A rank's weighted term of the attention over all ranks, on the device: see `ops.scale_partial`.

    scaled = out * exp(lse - base) / divisor        (base and divisor: see `partials`)

One program per tile of output rows, in the order of `scaled`, whose slices are the pieces of a
reduce-scatter over heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import check_contiguous
from .partials import load_sinks, rows_per_program, source_row, union_weights


@triton.jit(do_not_specialize=["tokens"])
def scale_kernel(  # noqa: D103
    out_ptr,
    lse_ptr,
    lses_ptr,
    sinks_ptr,
    scaled_ptr,
    tokens,
    HEADS: tl.constexpr,
    SLICES: tl.constexpr,
    RANKS: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tokens * HEADS
    o_row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_row = o_row < rows
    o_source = source_row(o_row, tokens, HEADS, SLICES).to(tl.int64)
    o_d = tl.arange(0, D_PADDED)
    m = m_row[:, None] & (o_d < D)[None, :]  # [BLOCK, D_PADDED]

    b_sink = load_sinks(sinks_ptr, o_source % HEADS, m_row)
    b_base, b_divisor = union_weights(lses_ptr + o_source, rows.to(tl.int64), b_sink, m_row, RANKS)
    b_lse = tl.load(lse_ptr + o_source, mask=m_row, other=float("-inf"))
    b_weight = tl.exp(b_lse - b_base) / b_divisor
    b_out = tl.load(out_ptr + o_source[:, None] * D + o_d[None, :], mask=m, other=0.0)
    # Selected, not multiplied away: an unwritten row of an empty shard may hold NaN.
    b_out = tl.where((b_lse == float("-inf"))[:, None], 0.0, b_out.to(tl.float32))
    p_scaled = scaled_ptr + o_row.to(tl.int64)[:, None] * D + o_d[None, :]
    tl.store(p_scaled, b_out * b_weight[:, None], mask=m)


def scale_partial(
    out: Tensor, lse: Tensor, lses: Tensor, sinks: Tensor | None, scaled: Tensor
) -> None:
    """Write this rank's term: out [T, H, D] of weight lse [T, H] among lses [W, T, H].

    scaled [n, T, H / n, D] in out's dtype. Raises `ValueError` that names the argument when
    shapes, dtypes or strides do not fit.
    """
    _check(out, lse, lses, sinks, scaled)
    tokens, heads, dim = out.shape
    if tokens == 0:
        return
    block = rows_per_program(dim)
    scale_kernel[(triton.cdiv(tokens * heads, block),)](
        out,
        lse,
        lses,
        sinks,
        scaled,
        tokens,
        HEADS=heads,
        SLICES=scaled.shape[0],
        RANKS=lses.shape[0],
        D=dim,
        D_PADDED=triton.next_power_of_2(dim),
        BLOCK=block,
        num_warps=4,
    )


def _check(out: Tensor, lse: Tensor, lses: Tensor, sinks: Tensor | None, scaled: Tensor) -> None:
    if out.dim() != 3:
        raise ValueError(f"out: wanted [T, H, D], got shape {tuple(out.shape)}")
    tokens, heads, dim = out.shape
    slices = scaled.shape[0]
    if slices == 0 or heads % slices or scaled.shape[1:] != (tokens, heads // slices, dim):
        raise ValueError(
            f"scaled: wanted [n, {tokens}, {heads} / n, {dim}], got shape {tuple(scaled.shape)}"
        )
    if lse.shape != (tokens, heads):
        raise ValueError(f"lse: wanted [{tokens}, {heads}], got shape {tuple(lse.shape)}")
    if lses.shape != (len(lses), tokens, heads):
        raise ValueError(f"lses: wanted [W, {tokens}, {heads}], got shape {tuple(lses.shape)}")
    check_contiguous(out.dtype, out=out, scaled=scaled)
    check_contiguous(torch.float32, lse=lse, lses=lses)
    if sinks is not None:
        check_contiguous(torch.float32, sinks=sinks)
        if sinks.shape != (heads,):
            raise ValueError(f"sinks: wanted [{heads}], got shape {tuple(sinks.shape)}")
