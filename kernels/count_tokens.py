"""Occurrences of every token on the device: see `ops.count_tokens`.

One program per slot: it clears and fills the occurrences of an admitted slot, or adds what the
slot's row has emitted. So an admission never meets the emissions of the slot's last request.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import check_contiguous
from .ops import IN_PROMPT
from .strides import stride_unit

BLOCK = 4096  # tokens of one iteration


@triton.jit(do_not_specialize=["rows", "vocab", "max_seq_len"])
def _count_kernel(
    admit_generation_ptr,
    admit_prompt_len_ptr,
    admit_given_len_ptr,
    history_ptr,
    emitted_slot_ptr,
    emitted_count_ptr,
    emitted_tokens_ptr,
    occurrences_ptr,
    rows,
    vocab,  # in units
    max_seq_len,
    UNIT: tl.constexpr,
    IN_PROMPT: tl.constexpr,
    EMITTED: tl.constexpr,
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    p_occurrences = occurrences_ptr + slot * vocab * UNIT
    if tl.load(admit_generation_ptr + slot) >= 0:
        for first in range(0, vocab * UNIT, BLOCK):
            token = first + tl.arange(0, BLOCK)
            tl.store(p_occurrences + token, tl.zeros([BLOCK], tl.int32), mask=token < vocab * UNIT)
        tl.debug_barrier()  # other threads of this program write the same addresses next
        p_history = history_ptr + slot * max_seq_len
        given = tl.load(admit_given_len_ptr + slot)
        for first in range(0, given, BLOCK):
            position = first + tl.arange(0, BLOCK)
            m_given = position < given
            token = tl.load(p_history + position, mask=m_given, other=0)
            tl.store(p_occurrences + token, tl.full([BLOCK], IN_PROMPT, tl.int32), mask=m_given)
        tl.debug_barrier()
        prompt_len = tl.load(admit_prompt_len_ptr + slot)
        for first in range(given, prompt_len, BLOCK):
            position = first + tl.arange(0, BLOCK)
            m_emitted = position < prompt_len
            token = tl.load(p_history + position, mask=m_emitted, other=0)
            one = tl.full([BLOCK], 1, tl.int32)
            tl.atomic_add(p_occurrences + token, one, mask=m_emitted, sem="relaxed")
    else:
        row = tl.arange(0, ROWS)
        row_slot = tl.load(emitted_slot_ptr + row, mask=row < rows, other=-1)
        i_row = tl.max(tl.where(row_slot == slot, row, -1), 0)  # a slot is in one row at most
        count = tl.load(emitted_count_ptr + i_row, mask=i_row >= 0, other=0)
        place = tl.arange(0, PLACES)
        m_emitted = place < count
        token = tl.load(emitted_tokens_ptr + i_row * EMITTED + place, mask=m_emitted, other=0)
        # Atomic: a row may emit one token several times.
        one = tl.full([PLACES], 1, tl.int32)
        tl.atomic_add(p_occurrences + token, one, mask=m_emitted, sem="relaxed")


def count_tokens(
    admit_generation: Tensor,
    admit_prompt_len: Tensor,
    admit_given_len: Tensor,
    history: Tensor,
    emitted_slot: Tensor,
    emitted_count: Tensor,
    emitted_tokens: Tensor,
    occurrences: Tensor,
) -> None:
    """Count the last step's emissions, then set every admitted slot from its history.

    Raises `ValueError` that names a tensor of another dtype or not contiguous.
    """
    check_contiguous(
        torch.int32,
        admit_generation=admit_generation,
        admit_prompt_len=admit_prompt_len,
        admit_given_len=admit_given_len,
        history=history,
        emitted_slot=emitted_slot,
        emitted_count=emitted_count,
        emitted_tokens=emitted_tokens,
        occurrences=occurrences,
    )
    slots, vocab = occurrences.shape
    rows, emitted = emitted_tokens.shape
    unit = stride_unit([vocab])
    _count_kernel[(slots,)](
        admit_generation,
        admit_prompt_len,
        admit_given_len,
        history,
        emitted_slot,
        emitted_count,
        emitted_tokens,
        occurrences,
        rows,
        vocab // unit,
        history.shape[1],
        UNIT=unit,
        IN_PROMPT=IN_PROMPT,
        EMITTED=emitted,
        ROWS=triton.next_power_of_2(rows),
        PLACES=triton.next_power_of_2(emitted),
        BLOCK=BLOCK,
        num_warps=8,
    )
