"""Oracle of `latent_write`: one entry after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from .fp8_ref import quantise_ref


def latent_write_ref(
    latent: Tensor,
    kv_slot: Tensor,
    pool: Tensor,
    latent_scale: Tensor | None = None,
    value_dim: int = 0,
) -> None:
    """Write into the pool what `ops.latent_write` must write."""
    if pool.dtype == torch.float8_e4m3fn:
        of_values, of_rope = (1.0, 1.0) if latent_scale is None else latent_scale.tolist()
        scales = [of_values] * value_dim + [of_rope] * (latent.shape[1] - value_dim)
        latent = quantise_ref(latent, torch.tensor(scales)).to(latent.device)
        pool = pool.view(torch.uint8)
    for t, slot in enumerate(kv_slot.tolist()):
        if slot != -1:
            page, entry = divmod(slot, pool.shape[1])
            pool[page, entry] = latent[t]
