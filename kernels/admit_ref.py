"""Oracle of `ops.admit`: one slot and one update at a time."""

from __future__ import annotations

from torch import Tensor


def admit_ref(
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
    """Apply admissions, releases and page updates to the slot state."""
    for slot in range(len(generation)):
        if int(admit_generation[slot]) >= 0:
            generation[slot] = int(admit_generation[slot])
            finish[slot] = 0
            context_len[slot] = int(admit_context_len[slot])
            seq_len[slot] = int(admit_prompt_len[slot])
            prompt_len[slot] = int(admit_prompt_len[slot])
            stop_len[slot] = int(admit_stop_len[slot])
            for n in range(stop_tokens.shape[1]):
                stop_tokens[slot, n] = int(admit_stop_tokens[slot, n])
            draft_count[slot] = 0
        elif int(release[slot]) != 0:
            generation[slot] = -1
            finish[slot] = 4
            for lengths in (context_len, seq_len, prompt_len, stop_len, draft_count):
                lengths[slot] = 0
    for slot, column, page in page_updates.tolist():
        if slot != -1:
            page_table[slot, column] = page
