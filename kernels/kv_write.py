"""Write K and V of a step's tokens into the paged pools.

    k, v    [T, Hkv, D]                  pools  [num_pages, Hkv, page_size, D]
    kv_slot [T] int64, page * page_size + offset, -1 = no entry

One program per token place, so the cost follows the bucket. A place whose slot is negative
loads and stores nothing. FP8 pools are written as bytes, rounded here: see `fp8`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, int64, uint8

from .fp8 import FP8, check_scale, quantise, scale_step
from .strides import stride_unit


@triton.jit(
    do_not_specialize=[
        "k_token",
        "k_head",
        "v_token",
        "v_head",
        "k_pool_page",
        "k_pool_head",
        "k_pool_entry",
        "v_pool_page",
        "v_pool_head",
        "v_pool_entry",
    ]
)
def kv_write_kernel(  # noqa: D103
    k_ptr,
    v_ptr,
    kv_slot_ptr,
    k_pool_ptr,
    v_pool_ptr,
    k_scale_ptr,
    v_scale_ptr,
    k_token,
    k_head,
    v_token,
    v_head,
    k_pool_page,
    k_pool_head,
    k_pool_entry,
    v_pool_page,
    v_pool_head,
    v_pool_entry,
    STRIDE_UNIT: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KV_HEADS_PADDED: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    QUANTISE: tl.constexpr,
    K_SCALE_HEAD: tl.constexpr,
    V_SCALE_HEAD: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(kv_slot_ptr + t)
    if slot >= 0:
        page = slot // PAGE_SIZE
        entry = slot % PAGE_SIZE
        o_h = tl.arange(0, KV_HEADS_PADDED).to(tl.int64)[:, None]
        o_d = tl.arange(0, D_PADDED)[None, :]
        m = (o_h < KV_HEADS) & (o_d < D)  # [KV_HEADS_PADDED, D_PADDED]
        b_k = tl.load(k_ptr + (t * k_token + o_h * k_head) * STRIDE_UNIT + o_d, mask=m)
        b_v = tl.load(v_ptr + (t * v_token + o_h * v_head) * STRIDE_UNIT + o_d, mask=m)
        if QUANTISE:
            b_k = quantise(
                b_k.to(tl.float32), head_scale(k_scale_ptr, o_h * K_SCALE_HEAD, KV_HEADS)
            )
            b_v = quantise(
                b_v.to(tl.float32), head_scale(v_scale_ptr, o_h * V_SCALE_HEAD, KV_HEADS)
            )
        o_k = (page * k_pool_page + o_h * k_pool_head + entry * k_pool_entry) * STRIDE_UNIT
        o_v = (page * v_pool_page + o_h * v_pool_head + entry * v_pool_entry) * STRIDE_UNIT
        tl.store(k_pool_ptr + o_k + o_d, b_k, mask=m)
        tl.store(v_pool_ptr + o_v + o_d, b_v, mask=m)


@triton.jit
def head_scale(scale_ptr, o_scale, KV_HEADS: tl.constexpr):
    """Scales at `o_scale`, 1 without any and past the last head."""
    if scale_ptr is None:
        return tl.full(o_scale.shape, 1.0, tl.float32)
    return tl.load(scale_ptr + o_scale, mask=o_scale < KV_HEADS, other=1.0)


def kv_write(
    k: Tensor,
    v: Tensor,
    kv_slot: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write k, v [T, Hkv, D] to the entries `kv_slot` [T] int64 of the pools; -1 writes nothing.

    Raises `ValueError` that names the argument when shapes, dtypes or strides do not fit.
    """
    check_kv(k, v, kv_slot, k_pool, v_pool)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        check_scale(name, scale, (1, k.shape[1]), k_pool)
    tokens, kv_heads, head_dim = k.shape
    if tokens == 0:
        return
    strides = (
        *k.stride()[:2],
        *v.stride()[:2],
        *k_pool.stride()[:3],
        *v_pool.stride()[:3],
    )
    unit, quantised = stride_unit(strides), k_pool.dtype == FP8
    kv_write_kernel[(tokens,)](
        k,
        v,
        kv_slot,
        k_pool.view(uint8) if quantised else k_pool,
        v_pool.view(uint8) if quantised else v_pool,
        k_scale,
        v_scale,
        *(stride // unit for stride in strides),
        STRIDE_UNIT=unit,
        KV_HEADS=kv_heads,
        KV_HEADS_PADDED=triton.next_power_of_2(kv_heads),
        D=head_dim,
        D_PADDED=triton.next_power_of_2(head_dim),
        PAGE_SIZE=k_pool.shape[2],
        QUANTISE=quantised,
        K_SCALE_HEAD=scale_step(k_scale),
        V_SCALE_HEAD=scale_step(v_scale),
        num_warps=4,
    )


def check_kv(k: Tensor, v: Tensor, kv_slot: Tensor, k_pool: Tensor, v_pool: Tensor) -> None:
    """Raise `ValueError` that names the argument when it does not fit the others."""
    if k.dim() != 3:
        raise ValueError(f"k: wanted [T, Hkv, D], got shape {tuple(k.shape)}")
    tokens, kv_heads, head_dim = k.shape
    if k_pool.dim() != 4 or (k_pool.shape[1], k_pool.shape[3]) != (kv_heads, head_dim):
        raise ValueError(
            f"k_pool: wanted [num_pages, {kv_heads}, page_size, {head_dim}], "
            f"got shape {tuple(k_pool.shape)}"
        )
    for name, tensor, like in (("v", v, k), ("v_pool", v_pool, k_pool)):
        if tensor.shape != like.shape:
            raise ValueError(f"{name}: wanted shape {tuple(like.shape)}, got {tuple(tensor.shape)}")
    written = k.dtype if k_pool.dtype == FP8 else k_pool.dtype
    for name, tensor, dtype in (
        ("k", k, written),
        ("v", v, written),
        ("v_pool", v_pool, k_pool.dtype),
    ):
        if tensor.dtype != dtype:
            raise ValueError(
                f"{name}: wanted {dtype} for pools of {k_pool.dtype}, got {tensor.dtype}"
            )
    for name, tensor in (("k", k), ("v", v), ("k_pool", k_pool), ("v_pool", v_pool)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name}: wanted a contiguous last dimension, got {tensor.stride()}")
    if kv_slot.shape != (tokens,) or kv_slot.dtype != int64 or not kv_slot.is_contiguous():
        raise ValueError(
            f"kv_slot: wanted contiguous int64 [{tokens}], got {kv_slot.dtype} "
            f"{tuple(kv_slot.shape)}"
        )
