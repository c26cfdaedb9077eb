"""Oracle of `latent_write`: one entry after the other."""

from __future__ import annotations

from torch import Tensor


def latent_write_ref(latent: Tensor, kv_slot: Tensor, pool: Tensor) -> None:
    """Write into the pool what `ops.latent_write` must write."""
    for t, slot in enumerate(kv_slot.tolist()):
        if slot != -1:
            page, entry = divmod(slot, pool.shape[1])
            pool[page, entry] = latent[t]
