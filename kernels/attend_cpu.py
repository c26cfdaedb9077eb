"""Paged attention on the CPU: vectorised eager torch, batched over rows.

What is computed together is the plan's (`attend_plan_cpu`), the arithmetic `attend_groups_cpu`'s.
"""

from __future__ import annotations

from torch import Tensor

from .attend_groups_cpu import attend_groups
from .attend_plan_cpu import plan
from .fp8_cpu import widen


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
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """CPU implementation of `ops.attend`; see there for shapes.

    Decode and prefill rows take the same path. Partials and work lists, which balance the
    programs of a GPU, are not used.
    """
    num_kv_heads, page_size = k_pool.shape[1:3]
    group = q.shape[1] // num_kv_heads
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
        scale if k_scale is None else scale * _by_head(k_scale, group),
        softcap,
        sinks,
        query_start[-1],
        out,
        lse,
        None if v_scale is None else _by_head(v_scale, group),
    )


def _by_head(scale: Tensor, group: int) -> Tensor:
    """[Hq, 1] or [1, 1] from a scale by KV head, or of all of them."""
    return (scale if len(scale) == 1 else scale.repeat_interleave(group)).unsqueeze(-1)


def _gather(pool: Tensor, entry: Tensor) -> Tensor:
    """Entries [n, D] of a pool, fp32."""
    if pool.is_contiguous():
        return widen(pool.view(-1, pool.shape[-1]).index_select(0, entry))
    head, offset = entry // pool.shape[2] % pool.shape[1], entry % pool.shape[2]
    return widen(pool[entry // (pool.shape[1] * pool.shape[2]), head, offset])
