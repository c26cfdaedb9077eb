"""Rows of a step on the CPU from lengths alone: see `ops.rows_from_lengths`."""

from __future__ import annotations

import numpy as np
from torch import Tensor


def rows_from_lengths(
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
    context, slot = context_len.numpy(), slot_of_row.numpy()
    end = np.clip(query_len.numpy(), 0, longest).cumsum().clip(max=tokens)
    places = np.diff(end, prepend=0)
    live = (slot >= 0) & (slot < len(slot_context_len)) & (context >= 0) & (context < max_seq_len)
    live &= places > 0
    row_slot.numpy()[:] = np.where(live, slot, -1)
    row_query_len.numpy()[:] = places

    slot, context, places = slot[live], context[live], places[live]
    chunk = places > 1 + max_drafts
    if prefill is not None:
        chunk |= prefill.numpy()[live] != 0
    seq = context + np.where(chunk, places, 1)
    slot_context_len.numpy()[slot] = context
    slot_seq_len.numpy()[slot] = seq
    slot_prompt_len.numpy()[slot] = np.where(chunk, seq, 0)
    slot_draft_count.numpy()[slot] = np.where(chunk, 0, places - 1)
