"""Oracle of `kv_write`: one entry after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from .fp8_ref import quantise_ref


def kv_write_ref(
    k: Tensor,
    v: Tensor,
    kv_slot: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write into the pools what `ops.kv_write` must write."""
    page_size = k_pool.shape[2]
    if k_pool.dtype == torch.float8_e4m3fn:
        ones = torch.ones(1)
        k, v = (
            quantise_ref(x, ones if scale is None else scale[:, None]).to(x.device)
            for x, scale in ((k, k_scale), (v, v_scale))
        )
        k_pool, v_pool = k_pool.view(torch.uint8), v_pool.view(torch.uint8)
    for t, slot in enumerate(kv_slot.tolist()):
        if slot != -1:
            page, entry = divmod(slot, page_size)
            for pool, new in ((k_pool, k), (v_pool, v)):
                pool[page, :, entry] = new[t]
