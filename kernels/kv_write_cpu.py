"""KV write on the CPU: vectorised eager torch."""

from __future__ import annotations

from torch import Tensor


def kv_write(k: Tensor, v: Tensor, kv_slot: Tensor, k_pool: Tensor, v_pool: Tensor) -> None:
    """CPU implementation of `ops.kv_write`; see there for shapes. Strided pools are accepted."""
    page_size = k_pool.shape[2]
    if bool((kv_slot < 0).any()):
        kept = (kv_slot >= 0).nonzero().squeeze(1)
        kv_slot, k, v = kv_slot[kept], k[kept], v[kept]
    page, offset = kv_slot // page_size, kv_slot % page_size
    k_pool.transpose(1, 2)[page, offset] = k.to(k_pool.dtype)
    v_pool.transpose(1, 2)[page, offset] = v.to(v_pool.dtype)
