"""Prompt lookup on the device: see `ops.ngram_draft`.

    matched[e] = max { n <= max_match : history[e - n : e] = history[seq - n : seq] }
    end        = the largest e < seq among those with the largest matched[e] >= min_match

One program per slot looks at blocks of ends e from the latest to the first, so that only a longer
match takes the place of one found before, and it is done with the first that cannot be longer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import check_contiguous

BLOCK = 4096  # ends of one iteration


@triton.jit(do_not_specialize=["max_seq_len", "min_match"])
def _ngram_draft_kernel(
    history_ptr,
    seq_len_ptr,
    context_len_ptr,
    stop_len_ptr,
    finish_ptr,
    draft_tokens_ptr,
    draft_count_ptr,
    max_seq_len,
    min_match,
    MAX_MATCH: tl.constexpr,
    MAX_DRAFTS: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_slot = tl.program_id(0).to(tl.int64)
    p_history = history_ptr + i_slot * max_seq_len
    seq = tl.load(seq_len_ptr + i_slot)
    stop_len = tl.load(stop_len_ptr + i_slot)
    decoding = tl.load(context_len_ptr + i_slot) == seq - 1
    decoding = decoding & (tl.load(finish_ptr + i_slot) == 0)
    # One token is emitted in any case, so a draft never reaches the place before the stop.
    room = tl.minimum(stop_len - seq - 1, max_seq_len - seq)
    room = tl.minimum(room, MAX_DRAFTS)

    longest, latest = 0, 0
    last = tl.where(decoding & (room > 0), seq, 0)  # ends before it are still to be looked at
    while (last > 1) & (longest < MAX_MATCH):
        lane = tl.arange(0, BLOCK)
        end = last - BLOCK + lane  # [BLOCK]
        same = end > 0
        matched = tl.zeros([BLOCK], tl.int32)
        # The loads do not wait for the comparison before: a chain of them would be slower than
        # what it leaves out, which is in the cache.
        for n in tl.static_range(1, MAX_MATCH + 1):
            exists = end >= n
            token = tl.load(p_history + end - n, mask=exists, other=-1)
            tail = tl.load(p_history + seq - n, mask=n < seq, other=-1)
            same = same & exists & (token == tail)
            matched = tl.where(same, n, matched)
        matched = tl.where(matched >= min_match, matched, 0)
        best = tl.max(matched * BLOCK + lane, 0)
        longer = best // BLOCK > longest
        latest = tl.where(longer, last - BLOCK + best % BLOCK, latest)
        longest = tl.where(longer, best // BLOCK, longest)
        last -= BLOCK

    count = tl.where(longest > 0, room, 0)
    i = tl.arange(0, PLACES)
    m_draft = i < count
    draft = tl.load(p_history + latest + i % tl.maximum(seq - latest, 1), mask=m_draft, other=0)
    tl.store(draft_tokens_ptr + i_slot * MAX_DRAFTS + i, draft, mask=m_draft)
    tl.store(draft_count_ptr + i_slot, count)


def ngram_draft(
    history: Tensor,
    seq_len: Tensor,
    context_len: Tensor,
    stop_len: Tensor,
    finish: Tensor,
    draft_tokens: Tensor,
    draft_count: Tensor,
    min_match: int,
    max_match: int,
) -> None:
    """Draft what followed the latest earlier occurrence of the last tokens of each slot.

    Raises `ValueError` that names a tensor of another dtype or not contiguous.
    """
    check_contiguous(
        torch.int32,
        history=history,
        seq_len=seq_len,
        context_len=context_len,
        stop_len=stop_len,
        finish=finish,
        draft_tokens=draft_tokens,
        draft_count=draft_count,
    )
    num_slots, max_drafts = draft_tokens.shape
    _ngram_draft_kernel[(num_slots,)](
        history,
        seq_len,
        context_len,
        stop_len,
        finish,
        draft_tokens,
        draft_count,
        history.shape[1],
        min_match,
        MAX_MATCH=max_match,
        MAX_DRAFTS=max_drafts,
        PLACES=triton.next_power_of_2(max_drafts),
        BLOCK=BLOCK,
        num_warps=8,
    )
