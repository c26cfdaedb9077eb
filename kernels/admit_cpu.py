"""Slot changes of a step on the CPU: see `ops.admit`."""

from __future__ import annotations

import numpy as np
from torch import Tensor


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
    """Apply admissions, releases and page updates to the slot state."""
    new_generation = admit_generation.numpy()
    admitted = new_generation >= 0
    changed = admitted | (release.numpy() != 0)
    if changed.any():
        for state, admitted_value, released_value in (
            (generation, new_generation, -1),
            (finish, 0, 4),
            (context_len, admit_context_len.numpy(), 0),
            (seq_len, admit_prompt_len.numpy(), 0),
            (prompt_len, admit_prompt_len.numpy(), 0),
            (stop_len, admit_stop_len.numpy(), 0),
            (draft_count, 0, 0),
        ):
            value = np.where(admitted, admitted_value, released_value)
            np.copyto(state.numpy(), value, where=changed, casting="same_kind")
        np.copyto(stop_tokens.numpy(), admit_stop_tokens.numpy(), where=admitted[:, None])

    slot, column, page = page_updates.numpy().T
    used = slot >= 0
    page_table.numpy()[slot[used], column[used]] = page[used]
