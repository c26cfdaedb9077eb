"""Rotate Q's rope part; norm, rotate and write latents: see `fused_ops.latent_rope_write`.

A program has one token and a block of Q's heads, or, the last one, its latent. Of the latent of a
place whose slot is negative it loads and stores nothing.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor, uint8

from .formulas import STYLES, check_formula
from .fp8 import FP8, check_scale, quantise
from .latent_write import check_latent
from .layout import check_contiguous
from .rms_norm import inverse_rms, weighted
from .rope_write import check_angles
from .rotary import (
    angle_constants,
    angle_rows,
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
        "latent_token",
        "out_token",
        "out_head",
        "pool_page",
        "pool_entry",
        "cos_token",
        "sin_token",
    ]
)
def latent_rope_write_kernel(  # noqa: D103
    q_ptr,
    latent_ptr,
    cos_ptr,
    sin_ptr,
    weight_ptr,
    kv_slot_ptr,
    out_ptr,
    pool_ptr,
    scale_ptr,
    eps,
    q_token,
    q_head,
    latent_token,
    out_token,
    out_head,
    pool_page,
    pool_entry,
    cos_token,
    sin_token,
    STRIDE_UNIT: tl.constexpr,
    ANGLE_UNIT: tl.constexpr,
    COS_PAIR: tl.constexpr,
    SIN_PAIR: tl.constexpr,
    HEADS: tl.constexpr,
    C: tl.constexpr,
    C_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    STYLE: tl.constexpr,
    PAIRS_IN: tl.constexpr,
    PAIRS_OUT: tl.constexpr,
    ROUND: tl.constexpr,
    QUANTISE: tl.constexpr,
):
    Q_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    t = tl.program_id(0).to(tl.int64)
    i_block = tl.program_id(1)
    o_pair = tl.arange(0, HALF_PADDED)[None, :]
    m_pair = o_pair < HALF
    o_a, o_b = pair_offsets(o_pair, HALF, PAIRS_IN)
    o_a_out, o_b_out = pair_offsets(o_pair, HALF, PAIRS_OUT)
    b_cos = load_angles(cos_ptr + t * cos_token * ANGLE_UNIT, COS_PAIR, HALF, HALF_PADDED)
    b_sin = load_angles(sin_ptr + t * sin_token * ANGLE_UNIT, SIN_PAIR, HALF, HALF_PADDED)
    if i_block < Q_BLOCKS:
        o_h = (i_block * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
        m = (o_h < HEADS) & m_pair
        p_q = q_ptr + (t * q_token + o_h * q_head) * STRIDE_UNIT
        p_out = out_ptr + (t * out_token + o_h * out_head) * STRIDE_UNIT
        b_a = tl.load(p_q + o_a, mask=m, other=0.0).to(tl.float32)
        b_b = tl.load(p_q + o_b, mask=m, other=0.0).to(tl.float32)
        b_a, b_b = rotated(b_a, b_b, b_cos, b_sin, DTYPE, ROUND)
        tl.store(p_out + o_a_out, b_a, mask=m)
        tl.store(p_out + o_b_out, b_b, mask=m)
    else:
        slot = tl.load(kv_slot_ptr + t)
        if slot >= 0:
            o_c = tl.arange(0, C_PADDED)
            m_c = o_c < C
            p_latent = latent_ptr + t * latent_token * STRIDE_UNIT
            b_c = tl.load(p_latent + o_c, mask=m_c, other=0.0).to(tl.float32)
            b_weight = tl.load(weight_ptr + o_c, mask=m_c, other=0.0).to(tl.float32)
            b_z = b_c * inverse_rms(tl.sum(b_c * b_c), eps, C)
            b_c = weighted(b_z, b_weight, DTYPE, STYLE).to(DTYPE)
            b_a = tl.load(p_latent + C + o_a, mask=m_pair, other=0.0).to(tl.float32)
            b_b = tl.load(p_latent + C + o_b, mask=m_pair, other=0.0).to(tl.float32)
            b_a, b_b = rotated(b_a, b_b, b_cos, b_sin, DTYPE, ROUND)
            b_a, b_b = b_a.to(DTYPE), b_b.to(DTYPE)
            if QUANTISE:
                c_scale, r_scale = 1.0, 1.0
                if scale_ptr is not None:
                    c_scale, r_scale = tl.load(scale_ptr), tl.load(scale_ptr + 1)
                b_c = quantise(b_c.to(tl.float32), c_scale)
                b_a = quantise(b_a.to(tl.float32), r_scale)
                b_b = quantise(b_b.to(tl.float32), r_scale)
            o_pool = (slot // PAGE_SIZE * pool_page + slot % PAGE_SIZE * pool_entry) * STRIDE_UNIT
            tl.store(pool_ptr + o_pool + o_c, b_c, mask=m_c)
            tl.store(pool_ptr + o_pool + C + o_a_out, b_a, mask=m_pair)
            tl.store(pool_ptr + o_pool + C + o_b_out, b_b, mask=m_pair)


def latent_rope_write(
    q: Tensor,
    latent: Tensor,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor,
    kv_slot: Tensor,
    q_out: Tensor,
    pool: Tensor,
    latent_scale: Tensor | None,
    eps: float,
    style: str,
    pairs_in: bool,
    pairs_out: bool,
) -> None:
    """Write q_out [T, Hq, R], and latents [T, C + R] to the entries `kv_slot` of the pool.

    Raises `ValueError` that names the argument when shapes, dtypes or strides do not fit.
    """
    check_latent(latent, kv_slot, pool)
    check_scale("latent_scale", latent_scale, (2,), pool)
    check_formula("style", style, STYLES)
    _check(q, latent, weight, q_out)
    check_angles(q, cos, sin)
    tokens, heads, rope_dim = q.shape
    if 2 * cos.shape[1] != rope_dim:
        raise ValueError(f"cos: wanted [{tokens}, {rope_dim // 2}], got {tuple(cos.shape)}")
    if tokens == 0:
        return
    strides = [*q.stride()[:2], latent.stride(0), *q_out.stride()[:2], *pool.stride()[:2]]
    unit, quantised = stride_unit(strides), pool.dtype == FP8
    constants = latent_rope_constants(heads, weight.shape[0], rope_dim)
    latent_rope_write_kernel[(tokens, triton.cdiv(heads, constants["BLOCK_H"]) + 1)](
        q,
        latent,
        cos,
        sin,
        weight,
        kv_slot,
        q_out,
        pool.view(uint8) if quantised else pool,
        latent_scale,
        eps,
        *(stride // unit for stride in strides),
        *angle_rows(cos, sin),
        STRIDE_UNIT=unit,
        PAGE_SIZE=pool.shape[1],
        STYLE=style,
        PAIRS_IN=pairs_in,
        PAIRS_OUT=pairs_out,
        QUANTISE=quantised,
        **angle_constants(q, cos, sin),
        **constants,
    )


def latent_rope_constants(heads: int, value_dim: int, rope_dim: int) -> dict[str, Any]:
    """Compile-time arguments that follow from the sizes, and options."""
    return {
        "HEADS": heads,
        "C": value_dim,
        "C_PADDED": padded(value_dim),
        "HALF": rope_dim // 2,
        "HALF_PADDED": padded(rope_dim // 2),
        "BLOCK_H": heads_per_program(heads, rope_dim),
        "num_warps": 4,
        "enable_fp_fusion": False,  # round where the unfused model rounds
    }


def _check(q: Tensor, latent: Tensor, weight: Tensor, q_out: Tensor) -> None:
    tokens, dim = latent.shape
    check_contiguous(latent.dtype, weight=weight)
    if weight.dim() != 1 or not 1 <= weight.shape[0] < dim:
        raise ValueError(f"weight: wanted [C], C from 1 to {dim - 1}, got {tuple(weight.shape)}")
    if q.dim() != 3 or (q.shape[0], q.shape[2]) != (tokens, dim - weight.shape[0]):
        raise ValueError(
            f"q: wanted [{tokens}, Hq, {dim - weight.shape[0]}], got shape {tuple(q.shape)}"
        )
    if q_out.shape != q.shape:
        raise ValueError(f"q_out: wanted shape {tuple(q.shape)}, got {tuple(q_out.shape)}")
    for name, tensor in (("q", q), ("q_out", q_out)):
        if tensor.dtype != latent.dtype or tensor.stride(-1) != 1:
            raise ValueError(
                f"{name}: wanted {latent.dtype} with a contiguous last dimension, "
                f"got {tensor.dtype} with strides {tensor.stride()}"
            )
