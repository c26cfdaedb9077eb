"""Latent write on the CPU: one indexed assignment of NumPy, as in `kv_write_cpu`."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from .fp8_cpu import FP8, latent_scales, quantise
from .layout import as_array


def latent_write(
    latent: Tensor,
    kv_slot: Tensor,
    pool: Tensor,
    latent_scale: Tensor | None = None,
    value_dim: int = 0,
) -> None:
    """CPU implementation of `ops.latent_write`; see there. Strided pools are accepted."""
    slot = kv_slot.numpy()
    written = slot >= 0
    page, offset = np.divmod(slot[written], pool.shape[1])
    if pool.dtype == FP8:
        scales = latent_scale
        if latent_scale is not None:
            scales = latent_scales(latent_scale, value_dim, pool.shape[2])
        latent = quantise(latent, scales)
    as_array(pool)[page, offset] = as_array(latent.to(pool.dtype))[written]
