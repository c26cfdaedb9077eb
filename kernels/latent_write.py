"""Write the latents of a step's tokens into the paged pool.

    latent  [T, D]                       pool  [num_pages, page_size, D]
    kv_slot [T] int64, page * page_size + offset, -1 = no entry

One program per token place, so the cost follows the bucket. A place whose slot is negative
loads and stores nothing. An FP8 pool is written as bytes, rounded here: see `fp8`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, int64, uint8

from .fp8 import FP8, check_scale, quantise
from .strides import stride_unit


@triton.jit(do_not_specialize=["latent_token", "pool_page", "pool_entry"])
def latent_write_kernel(  # noqa: D103
    latent_ptr,
    kv_slot_ptr,
    pool_ptr,
    scale_ptr,
    latent_token,
    pool_page,
    pool_entry,
    STRIDE_UNIT: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    QUANTISE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(kv_slot_ptr + t)
    if slot >= 0:
        o_d = tl.arange(0, D_PADDED)
        b_latent = tl.load(latent_ptr + t * latent_token * STRIDE_UNIT + o_d, mask=o_d < D)
        if QUANTISE:
            b_scale = tl.full((D_PADDED,), 1.0, tl.float32)
            if scale_ptr is not None:
                b_scale = tl.load(scale_ptr + (o_d >= VALUE_DIM).to(tl.int32))
            b_latent = quantise(b_latent.to(tl.float32), b_scale)
        o_pool = (slot // PAGE_SIZE * pool_page + slot % PAGE_SIZE * pool_entry) * STRIDE_UNIT
        tl.store(pool_ptr + o_pool + o_d, b_latent, mask=o_d < D)


def latent_write(
    latent: Tensor,
    kv_slot: Tensor,
    pool: Tensor,
    latent_scale: Tensor | None = None,
    value_dim: int = 0,
) -> None:
    """Write latent [T, D] to the entries `kv_slot` [T] int64 of the pool; -1 writes nothing.

    Raises `ValueError` that names the argument when shapes, dtypes or strides do not fit.
    """
    check_latent(latent, kv_slot, pool)
    check_scale("latent_scale", latent_scale, (2,), pool)
    tokens, dim = latent.shape
    if latent_scale is not None and not 1 <= value_dim < dim:
        raise ValueError(f"value_dim: wanted 1 to {dim - 1} with a latent_scale, got {value_dim}")
    if tokens == 0:
        return
    strides = (latent.stride(0), *pool.stride()[:2])
    unit, quantised = stride_unit(strides), pool.dtype == FP8
    latent_write_kernel[(tokens,)](
        latent,
        kv_slot,
        pool.view(uint8) if quantised else pool,
        latent_scale,
        *(stride // unit for stride in strides),
        STRIDE_UNIT=unit,
        D=dim,
        D_PADDED=triton.next_power_of_2(dim),
        PAGE_SIZE=pool.shape[1],
        QUANTISE=quantised,
        VALUE_DIM=value_dim,
        num_warps=4,
    )


def check_latent(latent: Tensor, kv_slot: Tensor, pool: Tensor) -> None:
    """Raise `ValueError` that names the argument when it does not fit the others."""
    if latent.dim() != 2:
        raise ValueError(f"latent: wanted [T, D], got shape {tuple(latent.shape)}")
    tokens, dim = latent.shape
    if pool.dim() != 3 or pool.shape[2] != dim:
        raise ValueError(
            f"pool: wanted [num_pages, page_size, {dim}], got shape {tuple(pool.shape)}"
        )
    if pool.dtype not in (latent.dtype, FP8):
        raise ValueError(f"latent: wanted the pool's {pool.dtype}, got {latent.dtype}")
    for name, tensor in (("latent", latent), ("pool", pool)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name}: wanted a contiguous last dimension, got {tensor.stride()}")
    if kv_slot.shape != (tokens,) or kv_slot.dtype != int64 or not kv_slot.is_contiguous():
        raise ValueError(
            f"kv_slot: wanted contiguous int64 [{tokens}], got {kv_slot.dtype} "
            f"{tuple(kv_slot.shape)}"
        )
