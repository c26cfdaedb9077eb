"""Oracle of `attend`: float64, one token and one head at a time, from the visible ranges alone.

It knows nothing of work lists, splits or tiles, and shares no code with the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .fp8_ref import dequantise_ref


def attend_ref(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    slot_of_row: Tensor,
    query_start: Tensor,
    visible_start: Tensor,
    visible_end: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Exact out [T, Hq, D] and lse [T, Hq] (natural log) of `ops.attend`: float64, on the CPU.

    Places past query_start[B] have out 0 and lse -inf.
    """
    q, page_table = q.cpu(), page_table.cpu()
    k_pool, v_pool = _values(k_pool, k_scale), _values(v_pool, v_scale)
    tokens, heads, head_dim = q.shape
    group = heads // k_pool.shape[1]
    out = torch.zeros(tokens, heads, head_dim, dtype=torch.float64)
    lse = torch.full((tokens, heads), -torch.inf, dtype=torch.float64)
    starts = query_start.tolist()
    ranges = list(zip(visible_start.tolist(), visible_end.tolist(), strict=True))
    for row, slot in enumerate(slot_of_row.tolist()):
        for t in range(starts[row], starts[row + 1]):
            positions = range(*ranges[t])
            keys = _entries(k_pool, page_table, slot, positions)
            values = _entries(v_pool, page_table, slot, positions)
            for head in range(heads):
                scores = scale * (keys[:, head // group] @ q[t, head].double())
                if softcap > 0:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head].double().cpu()[None]])
                lse[t, head] = torch.logsumexp(scores, 0) if len(scores) else -torch.inf
                weights = torch.softmax(scores, 0)[: len(positions)]
                out[t, head] = weights @ values[:, head // group]
    return out, lse


def _values(pool: Tensor, scale: Tensor | None) -> Tensor:
    """What the entries of a pool stand for."""
    if pool.dtype != torch.float8_e4m3fn:
        return pool.cpu()
    return dequantise_ref(pool, torch.ones(1) if scale is None else scale[:, None, None])


def _entries(pool: Tensor, page_table: Tensor, slot: int, positions: range) -> Tensor:
    """[len(positions), Hkv, D] float64, in order of position."""
    _, kv_heads, page_size, head_dim = pool.shape
    entries = torch.empty(len(positions), kv_heads, head_dim, dtype=torch.float64)
    for i, c in enumerate(positions):
        page = int(page_table[slot, c // page_size])
        entries[i] = pool[page, :, c % page_size].double()
    return entries
