"""Queries in the space of the latents, on the device: see `fused_ops.absorb_query`.

A program has a block of tokens of one head, and of it a block of the product's columns, or, the
last one, the rotated part. The tokens of a block are enough for the widest matrix instructions, in
every bucket: a token's product is the same whatever stands beside it.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor, dtype

from .attend_launch import check_contiguous_last, check_dimensions, precision_constants
from .grid import INTERPRETED
from .rotary import angle_constants, angle_rows, check_all_angles, padded, pair_offsets, rotated
from .strides import stride_unit


@triton.jit(
    do_not_specialize=[
        "tokens",
        "q_token",
        "q_head",
        "up_head",
        "up_row",
        "out_token",
        "out_head",
        "cos_token",
        "sin_token",
    ]
)
def absorb_query_kernel(  # noqa: D103
    q_ptr,
    up_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    tokens,
    q_token,
    q_head,
    up_head,
    up_row,
    out_token,
    out_head,
    cos_token,
    sin_token,
    STRIDE_UNIT: tl.constexpr,
    ANGLE_UNIT: tl.constexpr,
    COS_PAIR: tl.constexpr,
    SIN_PAIR: tl.constexpr,
    NOPE: tl.constexpr,
    C: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAIRS_IN: tl.constexpr,
    PAIRS_OUT: tl.constexpr,
    ROUND: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    C_BLOCKS: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    o_t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    head = tl.program_id(1).to(tl.int64)
    i_c = tl.program_id(2)
    m_t = o_t < tokens
    p_q = q_ptr + (o_t * q_token + head * q_head) * STRIDE_UNIT
    p_out = out_ptr + (o_t * out_token + head * out_head) * STRIDE_UNIT
    if i_c < C_BLOCKS:
        o_c = i_c * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
        b_out = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        for begin in range(0, NOPE, BLOCK_N):
            o_n = begin + tl.arange(0, BLOCK_N)
            o_up = (head * up_head + o_n.to(tl.int64)[:, None] * up_row) * STRIDE_UNIT
            b_q = tl.load(p_q + o_n[None, :], mask=m_t & (o_n < NOPE)[None, :], other=0.0)
            b_up = tl.load(up_ptr + o_up + o_c, mask=(o_n < NOPE)[:, None] & (o_c < C), other=0.0)
            if WIDEN:
                b_q, b_up = b_q.to(tl.float32), b_up.to(tl.float32)
            b_out = tl.dot(b_q, b_up, b_out, input_precision=PRECISION)
        tl.store(p_out + o_c, b_out.to(DTYPE), mask=m_t & (o_c < C))
    else:
        o_pair = tl.arange(0, HALF_PADDED)[None, :]
        m = m_t & (o_pair < HALF)
        o_a, o_b = pair_offsets(o_pair, HALF, PAIRS_IN)
        b_a = tl.load(p_q + NOPE + o_a, mask=m, other=0.0).to(tl.float32)
        b_b = tl.load(p_q + NOPE + o_b, mask=m, other=0.0).to(tl.float32)
        p_cos = cos_ptr + o_t * cos_token * ANGLE_UNIT + o_pair * COS_PAIR
        p_sin = sin_ptr + o_t * sin_token * ANGLE_UNIT + o_pair * SIN_PAIR
        b_cos = tl.load(p_cos, mask=m, other=0.0).to(tl.float32)
        b_sin = tl.load(p_sin, mask=m, other=0.0).to(tl.float32)
        b_a, b_b = rotated(b_a, b_b, b_cos, b_sin, DTYPE, ROUND)
        o_a, o_b = pair_offsets(o_pair, HALF, PAIRS_OUT)
        tl.store(p_out + C + o_a, b_a.to(DTYPE), mask=m)
        tl.store(p_out + C + o_b, b_b.to(DTYPE), mask=m)


def absorb_query(
    q: Tensor,
    up: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_out: Tensor,
    pairs_in: bool,
    pairs_out: bool,
) -> None:
    """Write q_out [T, Hq, C + R].

    Raises `ValueError` that names the argument when shapes, dtypes or strides do not fit.
    """
    _check(q, up, q_out)
    tokens, heads, dim = q.shape
    nope, value_dim = up.shape[1:]
    check_all_angles(q[..., nope:], cos, sin)
    if tokens == 0:
        return
    strides = (*q.stride()[:2], *up.stride()[:2], *q_out.stride()[:2])
    unit = stride_unit(strides)
    constants = absorb_constants(nope, value_dim, dim - nope, q.dtype)
    blocks = triton.cdiv(value_dim, constants["BLOCK_C"])
    absorb_query_kernel[(triton.cdiv(tokens, constants["BLOCK_T"]), heads, blocks + 1)](
        q,
        up,
        cos,
        sin,
        q_out,
        tokens,
        *(stride // unit for stride in strides),
        *angle_rows(cos, sin),
        STRIDE_UNIT=unit,
        PAIRS_IN=pairs_in,
        PAIRS_OUT=pairs_out,
        **angle_constants(q, cos, sin),
        **precision_constants(q.dtype, interpreted=INTERPRETED),
        **constants,
    )


def absorb_constants(nope: int, value_dim: int, rope_dim: int, kind: dtype) -> dict[str, Any]:
    """Compile-time arguments that follow from the sizes and the dtype, and options."""
    tokens, columns, step = (64, 128, 64) if kind.itemsize == 2 else (16, 64, 32)
    return {
        "NOPE": nope,
        "C": value_dim,
        "HALF": rope_dim // 2,
        "HALF_PADDED": padded(rope_dim // 2),
        "BLOCK_T": tokens,
        "BLOCK_C": min(columns, max(16, padded(value_dim))),
        "BLOCK_N": min(step, max(16, padded(nope))),
        "num_warps": 4,
        "enable_fp_fusion": False,  # round where the unfused model rounds
    }


def _check(q: Tensor, up: Tensor, q_out: Tensor) -> None:
    check_dimensions(
        q=(q, "[T, Hq, N + R]"), up=(up, "[Hq, N, C]"), q_out=(q_out, "[T, Hq, C + R]")
    )
    tokens, heads, dim = q.shape
    if up.shape[0] != heads or not 1 <= up.shape[1] < dim:
        raise ValueError(f"up: wanted [{heads}, N, C], N below {dim}, got shape {tuple(up.shape)}")
    wanted = (tokens, heads, dim - up.shape[1] + up.shape[2])
    if q_out.shape != wanted:
        raise ValueError(f"q_out: wanted shape {wanted}, got {tuple(q_out.shape)}")
    for name, tensor in (("up", up), ("q_out", q_out)):
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name}: wanted {q.dtype} like q, got {tensor.dtype}")
    check_contiguous_last(q=q, up=up, q_out=q_out)
