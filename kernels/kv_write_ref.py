"""Oracle of `kv_write`: one entry after the other."""

from __future__ import annotations

from torch import Tensor


def kv_write_ref(k: Tensor, v: Tensor, kv_slot: Tensor, k_pool: Tensor, v_pool: Tensor) -> None:
    """Write into the pools what `ops.kv_write` must write."""
    page_size = k_pool.shape[2]
    for t, slot in enumerate(kv_slot.tolist()):
        if slot != -1:
            page, entry = divmod(slot, page_size)
            for pool, new in ((k_pool, k), (v_pool, v)):
                pool[page, :, entry] = new[t]
