"""Union of a decode row's splits, and its product with W_UV, in one kernel.

    expanded_t = (sum_s w_s out_s) up^T        w_s = exp(lse_s - lse of all splits)

A program has a block of token places of one head. Their splits are summed a block of values at a
time, rounded as `out` would be, and multiplied. Outputs of prefill rows, which have no splits, are
taken from `out`; places past the last row get 0.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor, dtype

from .attend_launch import check_contiguous_last, check_dimensions, precision_constants
from .grid import INTERPRETED
from .strides import stride_unit

BLOCK_T = 16  # the rows of the smallest matrix instruction


@triton.jit(
    do_not_specialize=[
        "tokens",
        "rows",
        "query_places",
        "max_splits",
        "up_head",
        "up_row",
        "expanded_token",
        "expanded_head",
    ]
)
def latent_merge_kernel(  # noqa: D103
    partial_out_ptr,
    partial_lse_ptr,
    query_start_ptr,
    row_splits_ptr,
    out_ptr,
    up_ptr,
    expanded_ptr,
    tokens,
    rows,
    query_places,
    max_splits,
    up_head,
    up_row,
    expanded_token,
    expanded_head,
    STRIDE_UNIT: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    V_PADDED: tl.constexpr,
    ROWS_PADDED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    o_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1).to(tl.int64)
    m_t = o_t < tokens
    o_r = tl.arange(0, ROWS_PADDED)
    b_ends = tl.load(query_start_ptr + 1 + o_r, mask=o_r < rows, other=0x7FFFFFFF)
    b_row = tl.sum((b_ends[None, :] <= o_t[:, None]).to(tl.int32), 1)  # rows that end before
    m_row = b_row < rows
    b_splits = tl.load(row_splits_ptr + b_row, mask=m_row, other=0)
    b_place = o_t - tl.load(query_start_ptr + b_row, mask=m_row, other=0)
    m_direct = m_row & (b_splits == 0) & m_t
    o_first = (b_row.to(tl.int64) * max_splits * query_places + b_place) * HEADS + head
    split = query_places * HEADS
    most = tl.max(b_splits)

    b_max = tl.full((BLOCK_T,), float("-inf"), tl.float32)
    for s in range(0, most):
        p_lse = partial_lse_ptr + o_first + s * split
        b_max = tl.maximum(b_max, tl.load(p_lse, mask=s < b_splits, other=float("-inf")))
    b_base = tl.where(b_max == float("-inf"), 0.0, b_max)
    b_sum = tl.zeros((BLOCK_T,), tl.float32)
    for s in range(0, most):
        p_lse = partial_lse_ptr + o_first + s * split
        b_lse = tl.load(p_lse, mask=s < b_splits, other=float("-inf"))
        b_sum += tl.exp(b_lse - b_base)
    b_divisor = tl.where(b_sum == 0.0, 1.0, b_sum)

    o_v = tl.arange(0, V_PADDED)
    b_expanded = tl.zeros((BLOCK_T, V_PADDED), tl.float32)
    for begin in range(0, D, BLOCK_D):
        o_d = begin + tl.arange(0, BLOCK_D)
        m_d = (o_d < D)[None, :]
        p_out = out_ptr + (o_t.to(tl.int64) * HEADS + head)[:, None] * D + o_d[None, :]
        b_out = tl.load(p_out, mask=m_direct[:, None] & m_d, other=0.0).to(tl.float32)
        for s in range(0, most):
            o_split = o_first + s * split
            m_s = s < b_splits
            b_lse = tl.load(partial_lse_ptr + o_split, mask=m_s, other=float("-inf"))
            p_split = partial_out_ptr + o_split[:, None] * D + o_d[None, :]
            b_part = tl.load(p_split, mask=m_s[:, None] & m_d, other=0.0)
            b_out += b_part * (tl.exp(b_lse - b_base) / b_divisor)[:, None]
        p_up = up_ptr + (head * up_head + o_v.to(tl.int64)[:, None] * up_row) * STRIDE_UNIT
        b_up = tl.load(p_up + o_d[None, :], mask=(o_v < V)[:, None] & m_d, other=0.0)
        b_out = b_out.to(DTYPE)
        if WIDEN:
            b_out, b_up = b_out.to(tl.float32), b_up.to(tl.float32)
        b_expanded = tl.dot(b_out, tl.trans(b_up), b_expanded, input_precision=PRECISION)
    o_out = (o_t.to(tl.int64) * expanded_token + head * expanded_head)[:, None] * STRIDE_UNIT
    m_out = m_t[:, None] & (o_v < V)[None, :]
    tl.store(expanded_ptr + o_out + o_v[None, :], b_expanded.to(DTYPE), mask=m_out)


def launch_latent_merge(
    partial_out: Tensor,
    partial_lse: Tensor,
    query_start: Tensor,
    row_splits: Tensor,
    out: Tensor,
    up: Tensor,
    expanded: Tensor,
) -> None:
    """Write expanded [T, Hq, V] from the partials, and from `out` where a row has no splits."""
    batch, splits, query_len, heads, dim = partial_out.shape
    strides = (*up.stride()[:2], *expanded.stride()[:2])
    unit = stride_unit(strides)
    tokens = out.shape[0]
    latent_merge_kernel[(triton.cdiv(tokens, BLOCK_T), heads)](
        partial_out,
        partial_lse,
        query_start,
        row_splits,
        out,
        up,
        expanded,
        tokens,
        batch,
        query_len,
        splits,
        *(stride // unit for stride in strides),
        **latent_merge_constants(heads, dim, up.shape[1], batch, out.dtype),
        **precision_constants(out.dtype, interpreted=INTERPRETED),
        STRIDE_UNIT=unit,
    )


def latent_merge_constants(
    heads: int, dim: int, width: int, rows: int, kind: dtype
) -> dict[str, Any]:
    """Compile-time arguments that follow from the sizes and the dtype, and options."""
    step = 64 if kind.itemsize == 2 else 32
    return {
        "HEADS": heads,
        "D": dim,
        "V": width,
        "V_PADDED": max(16, int(triton.next_power_of_2(width))),
        "ROWS_PADDED": int(triton.next_power_of_2(rows)),
        "BLOCK_T": BLOCK_T,
        "BLOCK_D": min(step, max(16, int(triton.next_power_of_2(dim)))),
        "num_warps": 4,
        "num_stages": 2,
    }


def check_expansion(out: Tensor, up: Tensor | None, expanded: Tensor | None) -> None:
    """Raise `ValueError` unless both are None or expand out [T, Hq, Dv]."""
    if up is None or expanded is None:
        if up is not None or expanded is not None:
            raise ValueError("expanded: wanted together with up, or neither")
        return
    check_dimensions(up=(up, "[Hq, V, Dv]"), expanded=(expanded, "[T, Hq, V]"))
    tokens, heads, dim = out.shape
    for name, tensor, wanted in (
        ("up", up, (heads, up.shape[1], dim)),
        ("expanded", expanded, (tokens, heads, up.shape[1])),
    ):
        if tensor.shape != wanted or tensor.dtype != out.dtype:
            raise ValueError(
                f"{name}: wanted {out.dtype} {list(wanted)}, "
                f"got {tensor.dtype} {list(tensor.shape)}"
            )
    check_contiguous_last(up=up, expanded=expanded)
