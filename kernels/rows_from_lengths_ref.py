"""Oracle of `ops.rows_from_lengths`: one row at a time."""

from __future__ import annotations

from torch import Tensor


def rows_from_lengths_ref(
    query_len: Tensor,
    context_len: Tensor,
    slot_of_row: Tensor,
    prefill: Tensor | None,
    row_slot: Tensor,
    row_query_len: Tensor,
    slot_context_len: Tensor,
    slot_seq_len: Tensor,
    slot_prompt_len: Tensor,
    slot_draft_count: Tensor,
    tokens: int,
    longest: int,
    max_drafts: int,
    max_seq_len: int,
) -> None:
    """Write rows and slot state for `prepare`."""
    left = tokens
    for row in range(len(query_len)):
        places = min(max(int(query_len[row]), 0), longest, left)
        left -= places
        slot, context = int(slot_of_row[row]), int(context_len[row])
        known = slot in range(len(slot_context_len)) and context in range(max_seq_len)
        row_query_len[row] = places
        row_slot[row] = slot if known and places else -1
        if row_slot[row] < 0:
            continue
        slot_context_len[slot] = context
        if places > 1 + max_drafts or (prefill is not None and bool(prefill[row])):
            slot_seq_len[slot] = slot_prompt_len[slot] = context + places
            slot_draft_count[slot] = 0
        else:
            slot_seq_len[slot] = context + 1
            slot_prompt_len[slot] = 0
            slot_draft_count[slot] = places - 1
