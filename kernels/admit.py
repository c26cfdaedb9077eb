"""Slot changes of a step on the device: see `ops.admit`.

One launch; a program applies one block of slots and one block of page updates, which are
independent of each other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import check_contiguous

BLOCK = 128  # slots, and page updates, of one program


@triton.jit(do_not_specialize=["num_slots", "num_updates", "width"])
def _admit_kernel(
    admit_generation_ptr,
    release_ptr,
    admit_prompt_len_ptr,
    admit_context_len_ptr,
    admit_stop_len_ptr,
    admit_stop_tokens_ptr,
    page_updates_ptr,
    generation_ptr,
    finish_ptr,
    context_len_ptr,
    seq_len_ptr,
    prompt_len_ptr,
    stop_len_ptr,
    stop_tokens_ptr,
    draft_count_ptr,
    page_table_ptr,
    num_slots,
    num_updates,
    width,
    STOPS: tl.constexpr,
    STOPS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]

    m_slot = index < num_slots
    generation = tl.load(admit_generation_ptr + index, mask=m_slot, other=-1)
    admitted = generation >= 0
    m_change = admitted | (tl.load(release_ptr + index, mask=m_slot, other=0) != 0)
    prompt = tl.load(admit_prompt_len_ptr + index, mask=admitted, other=0)
    context = tl.load(admit_context_len_ptr + index, mask=admitted, other=0)
    stop_len = tl.load(admit_stop_len_ptr + index, mask=admitted, other=0)
    tl.store(generation_ptr + index, tl.where(admitted, generation, -1), mask=m_change)
    tl.store(finish_ptr + index, tl.where(admitted, 0, 4), mask=m_change)
    tl.store(context_len_ptr + index, context, mask=m_change)
    tl.store(seq_len_ptr + index, prompt, mask=m_change)
    tl.store(prompt_len_ptr + index, prompt, mask=m_change)
    tl.store(stop_len_ptr + index, stop_len, mask=m_change)
    tl.store(draft_count_ptr + index, tl.zeros([BLOCK], tl.int32), mask=m_change)
    stop = tl.arange(0, STOPS_PADDED)[None, :]
    o_stop = index[:, None] * STOPS + stop  # [BLOCK, STOPS_PADDED]
    m_stop = admitted[:, None] & (stop < STOPS)
    stop_token = tl.load(admit_stop_tokens_ptr + o_stop, mask=m_stop, other=-1)
    tl.store(stop_tokens_ptr + o_stop, stop_token, mask=m_stop)

    m_update = index < num_updates
    slot = tl.load(page_updates_ptr + index * 3, mask=m_update, other=-1)
    m_used = slot >= 0
    column = tl.load(page_updates_ptr + index * 3 + 1, mask=m_used, other=0)
    page = tl.load(page_updates_ptr + index * 3 + 2, mask=m_used, other=0)
    tl.store(page_table_ptr + slot.to(tl.int64) * width + column, page, mask=m_used)


def admit(
    admit_generation: Tensor,
    release: Tensor,
    admit_prompt_len: Tensor,
    admit_context_len: Tensor,
    admit_stop_len: Tensor,
    admit_stop_tokens: Tensor,
    page_updates: Tensor,
    generation: Tensor,
    finish: Tensor,
    context_len: Tensor,
    seq_len: Tensor,
    prompt_len: Tensor,
    stop_len: Tensor,
    stop_tokens: Tensor,
    draft_count: Tensor,
    page_table: Tensor,
) -> None:
    """Apply admissions, releases and page updates to the slot state.

    Raises `ValueError` that names a tensor of another dtype or not contiguous.
    """
    check_contiguous(
        torch.int32,
        admit_generation=admit_generation,
        release=release,
        admit_prompt_len=admit_prompt_len,
        admit_context_len=admit_context_len,
        admit_stop_len=admit_stop_len,
        admit_stop_tokens=admit_stop_tokens,
        page_updates=page_updates,
        generation=generation,
        finish=finish,
        context_len=context_len,
        seq_len=seq_len,
        prompt_len=prompt_len,
        stop_len=stop_len,
        stop_tokens=stop_tokens,
        draft_count=draft_count,
        page_table=page_table,
    )
    num_slots, num_updates = generation.shape[0], page_updates.shape[0]
    stops = stop_tokens.shape[1]
    _admit_kernel[(triton.cdiv(max(num_slots, num_updates), BLOCK),)](
        admit_generation,
        release,
        admit_prompt_len,
        admit_context_len,
        admit_stop_len,
        admit_stop_tokens,
        page_updates,
        generation,
        finish,
        context_len,
        seq_len,
        prompt_len,
        stop_len,
        stop_tokens,
        draft_count,
        page_table,
        num_slots,
        num_updates,
        page_table.shape[1],
        STOPS=stops,
        STOPS_PADDED=triton.next_power_of_2(stops),
        BLOCK=BLOCK,
        num_warps=4,
    )
