"""Oracle of `attend_latent`: float64, one token and one head at a time, from the visible ranges.

It knows nothing of work lists, splits or tiles, and shares no code with the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .fp8_ref import dequantise_ref


def attend_latent_ref(
    q: Tensor,
    pool: Tensor,
    page_table: Tensor,
    slot_of_row: Tensor,
    query_start: Tensor,
    visible_start: Tensor,
    visible_end: Tensor,
    *,
    value_dim: int,
    scale: float,
    latent_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Exact out [T, Hq, value_dim] and lse [T, Hq] of `ops.attend_latent`: float64, on the CPU.

    Places past query_start[B] have out 0 and lse -inf.
    """
    q, pool, page_table = q.cpu().double(), pool.cpu(), page_table.cpu()
    if pool.dtype == torch.float8_e4m3fn:
        of_values, of_rope = (1.0, 1.0) if latent_scale is None else latent_scale.tolist()
        scales = [of_values] * value_dim + [of_rope] * (q.shape[2] - value_dim)
        pool = dequantise_ref(pool, torch.tensor(scales))
    page_size = pool.shape[1]
    out = torch.zeros(*q.shape[:2], value_dim, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    starts, firsts, ends = query_start.tolist(), visible_start.tolist(), visible_end.tolist()
    for row, slot in enumerate(slot_of_row.tolist()):
        for t in range(starts[row], starts[row + 1]):
            seen = [
                pool[page_table[slot, c // page_size], c % page_size]
                for c in range(firsts[t], ends[t])
            ]
            if seen:
                latents = torch.stack(seen).double()
                for head in range(q.shape[1]):
                    scores = scale * (latents @ q[t, head])
                    lse[t, head] = torch.logsumexp(scores, 0)
                    out[t, head] = torch.softmax(scores, 0) @ latents[:, :value_dim]
    return out, lse
