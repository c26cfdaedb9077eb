"""Norm a query's low-rank part; norm, rotate and write latents: see `fused_ops.latent_norm_write`.

A token has two programs: one for its latent, one for its query. Of the latent of a place whose slot
is negative the first loads and stores nothing.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor, uint8

from .formulas import STYLES, check_formula
from .fp8 import FP8, check_scale, quantise
from .latent_write import check_latent
from .layout import check_contiguous, check_rows
from .rms_norm import inverse_rms, weighted
from .rotary import (
    angle_constants,
    angle_rows,
    check_all_angles,
    load_angles,
    padded,
    pair_offsets,
    rotated,
)
from .strides import stride_unit


@triton.jit(
    do_not_specialize=[
        "q_row",
        "out_row",
        "latent_row",
        "pool_page",
        "pool_entry",
        "cos_token",
        "sin_token",
    ]
)
def latent_norm_write_kernel(  # noqa: D103
    q_ptr,
    q_weight_ptr,
    out_ptr,
    latent_ptr,
    cos_ptr,
    sin_ptr,
    weight_ptr,
    kv_slot_ptr,
    pool_ptr,
    scale_ptr,
    eps,
    q_row,
    out_row,
    latent_row,
    pool_page,
    pool_entry,
    cos_token,
    sin_token,
    STRIDE_UNIT: tl.constexpr,
    ANGLE_UNIT: tl.constexpr,
    COS_PAIR: tl.constexpr,
    SIN_PAIR: tl.constexpr,
    N: tl.constexpr,
    N_PADDED: tl.constexpr,
    C: tl.constexpr,
    C_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    STYLE: tl.constexpr,
    PAIRS_IN: tl.constexpr,
    PAIRS_OUT: tl.constexpr,
    ROUND: tl.constexpr,
    QUANTISE: tl.constexpr,
):
    DTYPE: tl.constexpr = latent_ptr.dtype.element_ty
    t = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        slot = tl.load(kv_slot_ptr + t)
        if slot >= 0:
            p_latent = latent_ptr + t * latent_row * STRIDE_UNIT
            b_c = _normed(p_latent, weight_ptr, eps, C, C_PADDED, STYLE)
            o_c = tl.arange(0, C_PADDED)
            o_pair = tl.arange(0, HALF_PADDED)[None, :]
            m_pair = o_pair < HALF
            o_a, o_b = pair_offsets(o_pair, HALF, PAIRS_IN)
            b_cos = load_angles(cos_ptr + t * cos_token * ANGLE_UNIT, COS_PAIR, HALF, HALF_PADDED)
            b_sin = load_angles(sin_ptr + t * sin_token * ANGLE_UNIT, SIN_PAIR, HALF, HALF_PADDED)
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
            o_a, o_b = pair_offsets(o_pair, HALF, PAIRS_OUT)
            tl.store(pool_ptr + o_pool + o_c, b_c, mask=o_c < C)
            tl.store(pool_ptr + o_pool + C + o_a, b_a, mask=m_pair)
            tl.store(pool_ptr + o_pool + C + o_b, b_b, mask=m_pair)
    elif q_ptr is not None:
        o_n = tl.arange(0, N_PADDED)
        b_q = _normed(q_ptr + t * q_row * STRIDE_UNIT, q_weight_ptr, eps, N, N_PADDED, STYLE)
        tl.store(out_ptr + t * out_row * STRIDE_UNIT + o_n, b_q, mask=o_n < N)


@triton.jit
def _normed(p_row, weight_ptr, eps, N: tl.constexpr, N_PADDED: tl.constexpr, STYLE: tl.constexpr):
    """Norm of the N values at `p_row`, in their dtype."""
    DTYPE: tl.constexpr = p_row.dtype.element_ty
    o_n = tl.arange(0, N_PADDED)
    b_x = tl.load(p_row + o_n, mask=o_n < N, other=0.0).to(tl.float32)
    b_weight = tl.load(weight_ptr + o_n, mask=o_n < N, other=0.0).to(tl.float32)
    b_z = b_x * inverse_rms(tl.sum(b_x * b_x), eps, N)
    return weighted(b_z, b_weight, DTYPE, STYLE).to(DTYPE)


def latent_norm_write(
    q: Tensor | None,
    q_weight: Tensor | None,
    q_out: Tensor | None,
    latent: Tensor,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor,
    kv_slot: Tensor,
    pool: Tensor,
    latent_scale: Tensor | None,
    eps: float,
    style: str,
    pairs_in: bool,
    pairs_out: bool,
) -> None:
    """Write q_out [T, N], and latents [T, C + R] to the entries `kv_slot` of the pool.

    Raises `ValueError` that names the argument when shapes, dtypes or strides do not fit.
    """
    check_latent(latent, kv_slot, pool)
    check_scale("latent_scale", latent_scale, (2,), pool)
    check_formula("style", style, STYLES)
    _check_query(q, q_weight, q_out, latent)
    _check_entry(latent, weight, cos, sin)
    tokens, dim = latent.shape
    value_dim = weight.shape[0]
    if tokens == 0:
        return
    rows = [0 if tensor is None else tensor.stride(0) for tensor in (q, q_out, latent)]
    strides = [*rows, *pool.stride()[:2]]
    unit, quantised = stride_unit(strides), pool.dtype == FP8
    latent_norm_write_kernel[(tokens, 1 if q is None else 2)](
        q,
        q_weight,
        q_out,
        latent,
        cos,
        sin,
        weight,
        kv_slot,
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
        **angle_constants(latent, cos, sin),
        **latent_norm_constants(0 if q is None else q.shape[1], value_dim, dim - value_dim),
    )


def latent_norm_constants(width: int, value_dim: int, rope_dim: int) -> dict[str, Any]:
    """Compile-time arguments that follow from the sizes, and options."""
    return {
        "N": width,
        "N_PADDED": padded(width),
        "C": value_dim,
        "C_PADDED": padded(value_dim),
        "HALF": rope_dim // 2,
        "HALF_PADDED": padded(rope_dim // 2),
        "num_warps": 4,
        "enable_fp_fusion": False,  # round where the unfused model rounds
    }


def _check_query(
    q: Tensor | None, q_weight: Tensor | None, q_out: Tensor | None, latent: Tensor
) -> None:
    if q is None or q_weight is None or q_out is None:
        if any(tensor is not None for tensor in (q, q_weight, q_out)):
            raise ValueError("q: wanted together with q_weight and q_out, or none of them")
        return
    check_rows(latent.dtype, q=q, q_out=q_out)
    check_contiguous(latent.dtype, q_weight=q_weight)
    for name, tensor, wanted in (
        ("q", q, (latent.shape[0], q.shape[1])),
        ("q_out", q_out, q.shape),
        ("q_weight", q_weight, q.shape[1:]),
    ):
        if tensor.shape != wanted:
            raise ValueError(f"{name}: wanted shape {tuple(wanted)}, got {tuple(tensor.shape)}")


def _check_entry(latent: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> None:
    dim = latent.shape[1]
    check_contiguous(latent.dtype, weight=weight)
    if weight.dim() != 1 or not 1 <= weight.shape[0] < dim:
        raise ValueError(f"weight: wanted [C], C from 1 to {dim - 1}, got {tuple(weight.shape)}")
    check_all_angles(latent[:, None, weight.shape[0] :], cos, sin)
