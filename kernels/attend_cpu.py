"""Paged attention on the CPU: vectorised eager torch, batched over rows.

What is computed together is the plan's (`attend_plan_cpu`), the arithmetic `attend_groups_cpu`'s.
"""

from __future__ import annotations

from torch import Tensor

from .attend_groups_cpu import attend_groups
from .attend_plan_cpu import plan


def attend(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
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
    sinks: Tensor | None,
    partial_out: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float,
    decode_query_len: int,
    prefill_block: int,
) -> None:
    """CPU implementation of `ops.attend`; see there for shapes.

    Decode and prefill rows take the same path. Partials and work lists, which balance the
    programs of a GPU, are not used.
    """
    num_kv_heads, page_size = k_pool.shape[1:3]
    groups = plan(
        slot_of_row,
        query_start,
        visible_start,
        visible_end,
        page_table,
        page_size=page_size,
        num_q_heads=q.shape[1],
        num_kv_heads=num_kv_heads,
        head_dim=q.shape[2],
    )
    attend_groups(
        q,
        groups,
        lambda entry: (_gather(k_pool, entry), _gather(v_pool, entry)),
        num_kv_heads,
        scale,
        softcap,
        sinks,
        query_start[-1],
        out,
        lse,
    )


def _gather(pool: Tensor, entry: Tensor) -> Tensor:
    """Entries [n, D] of a pool, fp32."""
    if pool.is_contiguous():
        return pool.view(-1, pool.shape[-1]).index_select(0, entry).float()
    head, offset = entry // pool.shape[2] % pool.shape[1], entry % pool.shape[2]
    return pool[entry // (pool.shape[1] * pool.shape[2]), head, offset].float()
