"""Acceptance and state update on the device: see `ops.commit`.

One program per row. The logits places of a row are one vector: a place is reached while every
place before it was an accepted draft that ended nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import check_contiguous


@triton.jit(do_not_specialize=["max_seq_len"])
def _commit_kernel(
    sampled_ptr,
    slot_of_row_ptr,
    token_count_ptr,
    logits_start_ptr,
    logits_count_ptr,
    generation_ptr,
    stop_len_ptr,
    stop_tokens_ptr,
    draft_tokens_ptr,
    context_len_ptr,
    seq_len_ptr,
    finish_ptr,
    history_ptr,
    draft_count_ptr,
    out_slot_ptr,
    out_generation_ptr,
    out_count_ptr,
    out_finish_ptr,
    out_context_len_ptr,
    out_tokens_ptr,
    max_seq_len,
    MAX_DRAFTS: tl.constexpr,
    PLACES: tl.constexpr,
    STOPS: tl.constexpr,
    STOPS_PADDED: tl.constexpr,
):
    i_row = tl.program_id(0)
    slot = tl.load(slot_of_row_ptr + i_row).to(tl.int64)
    used = slot >= 0
    was_finish = tl.load(finish_ptr + slot, mask=used, other=4)
    live = used & (was_finish == 0)
    context = tl.load(context_len_ptr + slot, mask=used, other=0)
    seq = tl.load(seq_len_ptr + slot, mask=live, other=0)
    stop_len = tl.load(stop_len_ptr + slot, mask=live, other=0)
    count = tl.load(logits_count_ptr + i_row, mask=live, other=0)

    i = tl.arange(0, PLACES)
    exists = i < count
    first = tl.load(logits_start_ptr + i_row)
    token = tl.load(sampled_ptr + first + i, mask=exists, other=-1)  # [PLACES]
    m_draft = i + 1 < count
    draft = tl.load(draft_tokens_ptr + slot * max(MAX_DRAFTS, 1) + i, mask=m_draft, other=-1)
    stop = tl.arange(0, STOPS_PADDED)
    m_stop = live & (stop < STOPS)
    stop_token = tl.load(stop_tokens_ptr + slot * STOPS + stop, mask=m_stop, other=-1)

    # How a place would end the request: error before stop token before length.
    length = seq + i + 1
    is_stop = token[:, None] == stop_token[None, :]  # [PLACES, STOPS_PADDED]
    stopped = tl.max(is_stop.to(tl.int32), 1) > 0
    ending = tl.where(length >= stop_len, 2, 0)
    ending = tl.where(stopped, 1, ending)
    ending = tl.where(token < 0, 3, ending)

    refused = ((ending != 0) | (token != draft)).to(tl.int32)
    reached = exists & (tl.cumsum(refused, 0) - refused == 0)
    emitted = reached & (token >= 0)
    emitted_count = tl.sum(emitted.to(tl.int32), 0)
    new_finish = tl.max(tl.where(reached, ending, 0), 0)
    token_count = tl.load(token_count_ptr + i_row)
    new_context = tl.where(count > 0, seq + emitted_count - 1, context + token_count)

    tl.store(history_ptr + slot * max_seq_len + length - 1, token, mask=emitted)
    tl.store(context_len_ptr + slot, new_context, mask=live)
    tl.store(seq_len_ptr + slot, seq + emitted_count, mask=live)
    tl.store(finish_ptr + slot, new_finish, mask=live)
    tl.store(draft_count_ptr + slot, 0, mask=live)

    tl.store(out_slot_ptr + i_row, slot.to(tl.int32))
    tl.store(out_generation_ptr + i_row, tl.load(generation_ptr + slot, mask=used, other=-1))
    tl.store(out_count_ptr + i_row, emitted_count)
    tl.store(out_finish_ptr + i_row, tl.where(live, new_finish, was_finish))
    tl.store(out_context_len_ptr + i_row, tl.where(live, new_context, context))
    p_out = out_tokens_ptr + i_row * (1 + MAX_DRAFTS) + i
    tl.store(p_out, tl.where(emitted, token, -1), mask=i < 1 + MAX_DRAFTS)


def commit(
    sampled: Tensor,
    slot_of_row: Tensor,
    token_count: Tensor,
    logits_start: Tensor,
    logits_count: Tensor,
    generation: Tensor,
    stop_len: Tensor,
    stop_tokens: Tensor,
    draft_tokens: Tensor,
    context_len: Tensor,
    seq_len: Tensor,
    finish: Tensor,
    history: Tensor,
    draft_count: Tensor,
    out_slot: Tensor,
    out_generation: Tensor,
    out_count: Tensor,
    out_finish: Tensor,
    out_context_len: Tensor,
    out_tokens: Tensor,
) -> None:
    """Accept drafts, append emitted tokens, end requests, fill the output block.

    Raises `ValueError` that names a tensor of another dtype or not contiguous.
    """
    check_contiguous(
        torch.int32,
        sampled=sampled,
        slot_of_row=slot_of_row,
        token_count=token_count,
        logits_start=logits_start,
        logits_count=logits_count,
        generation=generation,
        stop_len=stop_len,
        stop_tokens=stop_tokens,
        draft_tokens=draft_tokens,
        context_len=context_len,
        seq_len=seq_len,
        finish=finish,
        history=history,
        draft_count=draft_count,
        out_slot=out_slot,
        out_generation=out_generation,
        out_count=out_count,
        out_finish=out_finish,
        out_context_len=out_context_len,
        out_tokens=out_tokens,
    )
    num_rows, places = out_tokens.shape
    stops = stop_tokens.shape[1]
    _commit_kernel[(num_rows,)](
        sampled,
        slot_of_row,
        token_count,
        logits_start,
        logits_count,
        generation,
        stop_len,
        stop_tokens,
        draft_tokens,
        context_len,
        seq_len,
        finish,
        history,
        draft_count,
        out_slot,
        out_generation,
        out_count,
        out_finish,
        out_context_len,
        out_tokens,
        history.shape[1],
        MAX_DRAFTS=places - 1,
        PLACES=triton.next_power_of_2(places),
        STOPS=stops,
        STOPS_PADDED=triton.next_power_of_2(stops),
        num_warps=1,
    )
