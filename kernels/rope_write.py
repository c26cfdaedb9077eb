"""Norm and rotate the heads of Q and K, write K and V into pages: see `fused_ops.rope_write`.

A program has one token and a block of heads: of Q in the first blocks, of K and V in the others. Of
K and V of a place whose slot is negative it loads and stores nothing.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor, uint8

from .formulas import STYLES, check_formula
from .fp8 import FP8, check_scale, quantise, scale_step
from .kv_write import check_kv, head_scale
from .layout import check_contiguous
from .rms_norm import inverse_rms, weighted
from .rotary import (
    angle_constants,
    angle_rows,
    check_angles,
    heads_per_program,
    load_angles,
    padded,
    pair_offsets,
    rotated,
)
from .strides import stride_unit


@triton.jit(
    do_not_specialize=[
        "q_token",
        "q_head",
        "k_token",
        "k_head",
        "v_token",
        "v_head",
        "out_token",
        "out_head",
        "k_pool_page",
        "k_pool_head",
        "k_pool_entry",
        "v_pool_page",
        "v_pool_head",
        "v_pool_entry",
        "cos_token",
        "sin_token",
    ]
)
def rope_write_kernel(  # noqa: D103
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    kv_slot_ptr,
    out_ptr,
    k_pool_ptr,
    v_pool_ptr,
    k_scale_ptr,
    v_scale_ptr,
    eps,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    out_token,
    out_head,
    k_pool_page,
    k_pool_head,
    k_pool_entry,
    v_pool_page,
    v_pool_head,
    v_pool_entry,
    cos_token,
    sin_token,
    STRIDE_UNIT: tl.constexpr,
    ANGLE_UNIT: tl.constexpr,
    COS_PAIR: tl.constexpr,
    SIN_PAIR: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    PASS_PADDED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    STYLE: tl.constexpr,
    PAIRS_IN: tl.constexpr,
    PAIRS_OUT: tl.constexpr,
    ROUND: tl.constexpr,
    QUANTISE: tl.constexpr,
    K_SCALE_HEAD: tl.constexpr,
    V_SCALE_HEAD: tl.constexpr,
):
    Q_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    t = tl.program_id(0).to(tl.int64)
    i_block = tl.program_id(1)
    b_cos = tl.full((1, HALF_PADDED), 1.0, tl.float32)
    b_sin = tl.full((1, HALF_PADDED), 0.0, tl.float32)
    if cos_ptr is not None:
        b_cos = load_angles(cos_ptr + t * cos_token * ANGLE_UNIT, COS_PAIR, HALF, HALF_PADDED)
        b_sin = load_angles(sin_ptr + t * sin_token * ANGLE_UNIT, SIN_PAIR, HALF, HALF_PADDED)
    if i_block < Q_BLOCKS:
        o_h = (i_block * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
        m_h = o_h < HEADS
        p_in = q_ptr + (t * q_token + o_h * q_head) * STRIDE_UNIT
        b_a, b_b, b_pass = _heads(
            p_in, q_weight_ptr, m_h, b_cos, b_sin, eps,
            D, HALF, HALF_PADDED, PASS_PADDED, STYLE, PAIRS_IN, ROUND,
        )  # fmt: skip
        p_out = out_ptr + (t * out_token + o_h * out_head) * STRIDE_UNIT
        _store(p_out, m_h, b_a, b_b, b_pass, D, HALF, HALF_PADDED, PASS_PADDED, PAIRS_OUT)
    else:
        slot = tl.load(kv_slot_ptr + t)
        if slot >= 0:
            page = slot // PAGE_SIZE
            entry = slot % PAGE_SIZE
            o_h = ((i_block - Q_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
            m_h = o_h < KV_HEADS
            o_d = tl.arange(0, D_PADDED)[None, :]
            p_in = k_ptr + (t * k_token + o_h * k_head) * STRIDE_UNIT
            b_a, b_b, b_pass = _heads(
                p_in, k_weight_ptr, m_h, b_cos, b_sin, eps,
                D, HALF, HALF_PADDED, PASS_PADDED, STYLE, PAIRS_IN, ROUND,
            )  # fmt: skip
            b_v = tl.load(
                v_ptr + (t * v_token + o_h * v_head) * STRIDE_UNIT + o_d, mask=m_h & (o_d < D)
            )
            if QUANTISE:
                b_scale = head_scale(k_scale_ptr, o_h * K_SCALE_HEAD, KV_HEADS)
                b_a, b_b, b_pass = (
                    quantise(b_a.to(tl.float32), b_scale),
                    quantise(b_b.to(tl.float32), b_scale),
                    quantise(b_pass.to(tl.float32), b_scale),
                )
                b_scale = head_scale(v_scale_ptr, o_h * V_SCALE_HEAD, KV_HEADS)
                b_v = quantise(b_v.to(tl.float32), b_scale)
            o_k = (page * k_pool_page + o_h * k_pool_head + entry * k_pool_entry) * STRIDE_UNIT
            o_v = (page * v_pool_page + o_h * v_pool_head + entry * v_pool_entry) * STRIDE_UNIT
            p_k = k_pool_ptr + o_k
            _store(p_k, m_h, b_a, b_b, b_pass, D, HALF, HALF_PADDED, PASS_PADDED, PAIRS_OUT)
            tl.store(v_pool_ptr + o_v + o_d, b_v, mask=m_h & (o_d < D))


@triton.jit
def _heads(
    p_head, weight_ptr, m_h, b_cos, b_sin, eps,
    D: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, PASS_PADDED: tl.constexpr,
    STYLE: tl.constexpr, PAIRS_IN: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Heads at `p_head` [BLOCK_H, 1], normed when there is a weight, and rotated.

    The values of pairs, [BLOCK_H, HALF_PADDED] twice, and the others, [BLOCK_H, PASS_PADDED], all
    in the dtype of the heads.
    """
    DTYPE: tl.constexpr = p_head.dtype.element_ty
    o_pair = tl.arange(0, HALF_PADDED)[None, :]
    o_a, o_b = pair_offsets(o_pair, HALF, PAIRS_IN)
    o_pass = 2 * HALF + tl.arange(0, PASS_PADDED)[None, :]
    m_pair, m_pass = o_pair < HALF, o_pass < D
    b_a = tl.load(p_head + o_a, mask=m_h & m_pair, other=0.0).to(tl.float32)
    b_b = tl.load(p_head + o_b, mask=m_h & m_pair, other=0.0).to(tl.float32)
    b_pass = tl.load(p_head + o_pass, mask=m_h & m_pass, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        b_sum = tl.sum(b_a * b_a, 1) + tl.sum(b_b * b_b, 1) + tl.sum(b_pass * b_pass, 1)
        b_inverse = inverse_rms(b_sum, eps, D)[:, None]
        w_a = tl.load(weight_ptr + o_a, mask=m_pair, other=0.0).to(tl.float32)
        w_b = tl.load(weight_ptr + o_b, mask=m_pair, other=0.0).to(tl.float32)
        w_pass = tl.load(weight_ptr + o_pass, mask=m_pass, other=0.0).to(tl.float32)
        b_a = weighted(b_a * b_inverse, w_a, DTYPE, STYLE).to(DTYPE).to(tl.float32)
        b_b = weighted(b_b * b_inverse, w_b, DTYPE, STYLE).to(DTYPE).to(tl.float32)
        b_pass = weighted(b_pass * b_inverse, w_pass, DTYPE, STYLE)
    b_a, b_b = rotated(b_a, b_b, b_cos, b_sin, DTYPE, ROUND)
    return b_a.to(DTYPE), b_b.to(DTYPE), b_pass.to(DTYPE)


@triton.jit
def _store(
    p_head, m_h, b_a, b_b, b_pass,
    D: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, PASS_PADDED: tl.constexpr,
    PAIRS_OUT: tl.constexpr,
):  # fmt: skip
    """Store heads as `_heads` returns them."""
    o_pair = tl.arange(0, HALF_PADDED)[None, :]
    o_a, o_b = pair_offsets(o_pair, HALF, PAIRS_OUT)
    o_pass = 2 * HALF + tl.arange(0, PASS_PADDED)[None, :]
    tl.store(p_head + o_a, b_a, mask=m_h & (o_pair < HALF))
    tl.store(p_head + o_b, b_b, mask=m_h & (o_pair < HALF))
    tl.store(p_head + o_pass, b_pass, mask=m_h & (o_pass < D))


def rope_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    kv_slot: Tensor,
    q_out: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    eps: float,
    style: str,
    pairs_in: bool,
    pairs_out: bool,
) -> None:
    """Write q_out [T, Hq, D], and K and V to the entries `kv_slot` of the pools.

    Raises `ValueError` that names the argument when shapes, dtypes or strides do not fit.
    """
    check_kv(k, v, kv_slot, k_pool, v_pool)
    check_formula("style", style, STYLES)
    _check_heads(q, k, q_out)
    check_angles(q, cos, sin)
    _check_weights(q, q_weight, k_weight)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        check_scale(name, scale, (1, k.shape[1]), k_pool)
    tokens, heads, dim = q.shape
    if tokens == 0:
        return
    strides = [x for tensor in (q, k, v, q_out) for x in tensor.stride()[:2]]
    strides += [*k_pool.stride()[:3], *v_pool.stride()[:3]]
    unit, quantised = stride_unit(strides), k_pool.dtype == FP8
    half = 0 if cos is None else cos.shape[1]
    constants = rope_constants(heads, k.shape[1], dim, half)
    block = constants["BLOCK_H"]
    rope_write_kernel[(tokens, triton.cdiv(heads, block) + triton.cdiv(k.shape[1], block))](
        q,
        k,
        v,
        cos,
        sin,
        q_weight,
        k_weight,
        kv_slot,
        q_out,
        k_pool.view(uint8) if quantised else k_pool,
        v_pool.view(uint8) if quantised else v_pool,
        k_scale,
        v_scale,
        eps,
        *(stride // unit for stride in strides),
        *angle_rows(cos, sin),
        STRIDE_UNIT=unit,
        PAGE_SIZE=k_pool.shape[2],
        STYLE=style,
        PAIRS_IN=pairs_in,
        PAIRS_OUT=pairs_out,
        QUANTISE=quantised,
        K_SCALE_HEAD=scale_step(k_scale),
        V_SCALE_HEAD=scale_step(v_scale),
        **angle_constants(q, cos, sin),
        **constants,
    )


def rope_constants(heads: int, kv_heads: int, dim: int, half: int) -> dict[str, Any]:
    """Compile-time arguments that follow from the sizes, and options."""
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "D": dim,
        "D_PADDED": padded(dim),
        "HALF": half,
        "HALF_PADDED": padded(half),
        "PASS_PADDED": padded(dim - 2 * half),
        "BLOCK_H": heads_per_program(heads, dim),
        "num_warps": 4,
        "enable_fp_fusion": False,  # round where the unfused model rounds
    }


def _check_heads(q: Tensor, k: Tensor, q_out: Tensor) -> None:
    if q.dim() != 3 or (q.shape[0], q.shape[2]) != (k.shape[0], k.shape[2]):
        raise ValueError(f"q: wanted [{k.shape[0]}, Hq, {k.shape[2]}], got shape {tuple(q.shape)}")
    if q_out.shape != q.shape:
        raise ValueError(f"q_out: wanted shape {tuple(q.shape)}, got {tuple(q_out.shape)}")
    for name, tensor in (("q", q), ("q_out", q_out)):
        if tensor.dtype != k.dtype or tensor.stride(-1) != 1:
            raise ValueError(
                f"{name}: wanted {k.dtype} with a contiguous last dimension, "
                f"got {tensor.dtype} with strides {tensor.stride()}"
            )


def _check_weights(q: Tensor, q_weight: Tensor | None, k_weight: Tensor | None) -> None:
    if (q_weight is None) != (k_weight is None):
        raise ValueError("k_weight: wanted together with q_weight, or neither")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            check_contiguous(q.dtype, **{name: weight})
            if weight.shape != q.shape[2:]:
                raise ValueError(f"{name}: wanted [{q.shape[2]}], got {tuple(weight.shape)}")
