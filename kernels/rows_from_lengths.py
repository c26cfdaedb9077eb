"""Rows of a step on the device from lengths alone: see `ops.rows_from_lengths`.

One program over all rows, since the places of a row end where those of the step do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import check_contiguous


@triton.jit(do_not_specialize=["num_rows", "num_slots", "tokens", "longest", "max_seq_len"])
def _rows_kernel(
    query_len_ptr,
    context_len_ptr,
    slot_of_row_ptr,
    prefill_ptr,
    row_slot_ptr,
    row_query_len_ptr,
    slot_context_len_ptr,
    slot_seq_len_ptr,
    slot_prompt_len_ptr,
    slot_draft_count_ptr,
    num_rows,
    num_slots,
    tokens,
    longest,
    max_seq_len,
    MAX_DRAFTS: tl.constexpr,
    HAS_PREFILL: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    m_row = row < num_rows
    places = tl.load(query_len_ptr + row, mask=m_row, other=0)
    context = tl.load(context_len_ptr + row, mask=m_row, other=-1)
    slot = tl.load(slot_of_row_ptr + row, mask=m_row, other=-1)

    places = tl.minimum(tl.maximum(places, 0), longest)
    end = tl.cumsum(places, 0)  # at most ROWS * tokens: no overflow
    places = tl.minimum(end, tokens) - tl.minimum(end - places, tokens)
    live = (slot >= 0) & (slot < num_slots) & (context >= 0) & (context < max_seq_len)
    live = live & (places > 0)
    tl.store(row_slot_ptr + row, tl.where(live, slot, -1), mask=m_row)
    tl.store(row_query_len_ptr + row, places, mask=m_row)

    prefill = places > 1 + MAX_DRAFTS
    if HAS_PREFILL:
        prefill = prefill | (tl.load(prefill_ptr + row, mask=m_row, other=0) != 0)
    seq = context + tl.where(prefill, places, 1)
    tl.store(slot_context_len_ptr + slot, context, mask=live)
    tl.store(slot_seq_len_ptr + slot, seq, mask=live)
    tl.store(slot_prompt_len_ptr + slot, tl.where(prefill, seq, 0), mask=live)
    tl.store(slot_draft_count_ptr + slot, tl.where(prefill, 0, places - 1), mask=live)


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
    """Write rows and slot state for `prepare`.

    Raises `ValueError` that names a tensor of another dtype or not contiguous.
    """
    check_contiguous(
        torch.int32,
        query_len=query_len,
        context_len=context_len,
        slot_of_row=slot_of_row,
        row_slot=row_slot,
        row_query_len=row_query_len,
        slot_context_len=slot_context_len,
        slot_seq_len=slot_seq_len,
        slot_prompt_len=slot_prompt_len,
        slot_draft_count=slot_draft_count,
        **({} if prefill is None else {"prefill": prefill}),
    )
    num_rows = query_len.shape[0]
    _rows_kernel[(1,)](
        query_len,
        context_len,
        slot_of_row,
        prefill,
        row_slot,
        row_query_len,
        slot_context_len,
        slot_seq_len,
        slot_prompt_len,
        slot_draft_count,
        num_rows,
        slot_context_len.shape[0],
        tokens,
        longest,
        max_seq_len,
        MAX_DRAFTS=max_drafts,
        HAS_PREFILL=prefill is not None,
        ROWS=triton.next_power_of_2(num_rows),
        num_warps=4,
    )
