"""Write the latents of a step's tokens into the paged pool.

    latent  [T, D]                       pool  [num_pages, page_size, D]
    kv_slot [T] int64, page * page_size + offset, -1 = no entry

One program per token place, so the cost follows the bucket. A place whose slot is negative
loads and stores nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, int64

from .strides import stride_unit


@triton.jit(do_not_specialize=["latent_token", "pool_page", "pool_entry"])
def latent_write_kernel(  # noqa: D103
    latent_ptr,
    kv_slot_ptr,
    pool_ptr,
    latent_token,
    pool_page,
    pool_entry,
    STRIDE_UNIT: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(kv_slot_ptr + t)
    if slot >= 0:
        o_d = tl.arange(0, D_PADDED)
        b_latent = tl.load(latent_ptr + t * latent_token * STRIDE_UNIT + o_d, mask=o_d < D)
        o_pool = (slot // PAGE_SIZE * pool_page + slot % PAGE_SIZE * pool_entry) * STRIDE_UNIT
        tl.store(pool_ptr + o_pool + o_d, b_latent, mask=o_d < D)


def latent_write(latent: Tensor, kv_slot: Tensor, pool: Tensor) -> None:
    """Write latent [T, D] to the entries `kv_slot` [T] int64 of the pool; -1 writes nothing.

    Raises `ValueError` that names the argument when shapes, dtypes or strides do not fit.
    """
    _check(latent, kv_slot, pool)
    tokens, dim = latent.shape
    if tokens == 0:
        return
    strides = (latent.stride(0), *pool.stride()[:2])
    unit = stride_unit(strides)
    latent_write_kernel[(tokens,)](
        latent,
        kv_slot,
        pool,
        *(stride // unit for stride in strides),
        STRIDE_UNIT=unit,
        D=dim,
        D_PADDED=triton.next_power_of_2(dim),
        PAGE_SIZE=pool.shape[1],
        num_warps=4,
    )


def _check(latent: Tensor, kv_slot: Tensor, pool: Tensor) -> None:
    if latent.dim() != 2:
        raise ValueError(f"latent: wanted [T, D], got shape {tuple(latent.shape)}")
    tokens, dim = latent.shape
    if pool.dim() != 3 or pool.shape[2] != dim:
        raise ValueError(
            f"pool: wanted [num_pages, page_size, {dim}], got shape {tuple(pool.shape)}"
        )
    if latent.dtype != pool.dtype:
        raise ValueError(f"latent: wanted the pool's {pool.dtype}, got {latent.dtype}")
    for name, tensor in (("latent", latent), ("pool", pool)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name}: wanted a contiguous last dimension, got {tensor.stride()}")
    if kv_slot.shape != (tokens,) or kv_slot.dtype != int64 or not kv_slot.is_contiguous():
        raise ValueError(
            f"kv_slot: wanted contiguous int64 [{tokens}], got {kv_slot.dtype} "
            f"{tuple(kv_slot.shape)}"
        )
