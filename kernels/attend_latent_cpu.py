"""Paged latent attention on the CPU: `attend_cpu` with one KV head, whose V lies in its K."""

from __future__ import annotations

import torch
from torch import Tensor

from .attend_groups_cpu import attend_groups
from .attend_plan_cpu import plan
from .fp8_cpu import latent_scales, widen


def attend_latent(
    q: Tensor,
    pool: Tensor,
    page_table: Tensor,
    slot_of_row: Tensor,
    query_start: Tensor,
    visible_start: Tensor,
    visible_end: Tensor,
    row_begin: Tensor,
    row_end: Tensor,
    row_chunk: Tensor,
    row_splits: Tensor,
    decode_items: Tensor,
    decode_count: Tensor,
    prefill_items: Tensor | None,
    prefill_count: Tensor | None,
    partial_out: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    decode_query_len: int,
    prefill_block: int,
    latent_scale: Tensor | None = None,
    up: Tensor | None = None,
    expanded: Tensor | None = None,
) -> None:
    """CPU implementation of `ops.attend_latent`; see there for shapes.

    Decode and prefill rows take the same path; partials and work lists are not used.
    """
    page_size, value_dim = pool.shape[1], out.shape[2]

    def load(entry: Tensor) -> tuple[Tensor, Tensor]:
        if pool.is_contiguous():
            latent = widen(pool.view(-1, pool.shape[2]).index_select(0, entry))
        else:
            latent = widen(pool[entry // page_size, entry % page_size])
        return latent, latent[:, :value_dim]

    groups = plan(
        slot_of_row,
        query_start,
        visible_start,
        visible_end,
        page_table,
        page_size=page_size,
        num_q_heads=q.shape[1],
        num_kv_heads=1,
        head_dim=q.shape[2],
    )
    q_scale: float | Tensor = scale
    if latent_scale is not None:
        q_scale = scale * latent_scales(latent_scale, value_dim, q.shape[2])
    of_values = None if latent_scale is None else latent_scale[:1]
    attend_groups(q, groups, load, 1, q_scale, 0.0, None, query_start[-1], out, lse, of_values)
    if up is not None and expanded is not None:
        torch.bmm(out.transpose(0, 1), up.transpose(1, 2), out=expanded.transpose(0, 1))
