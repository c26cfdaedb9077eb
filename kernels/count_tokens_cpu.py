"""Occurrences of every token on the CPU: see `ops.count_tokens`."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from .ops import IN_PROMPT


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
    """Count the last step's emissions, then set every admitted slot from its history."""
    counts = occurrences.numpy()
    row_slot = emitted_slot.numpy()
    emitted = np.arange(emitted_tokens.shape[1]) < emitted_count.numpy()[:, None]  # [B, 1+K]
    row, place = np.nonzero(emitted & (row_slot[:, None] >= 0))
    # `at`: a row may emit one token several times.
    np.add.at(counts, (row_slot[row], emitted_tokens.numpy()[row, place]), 1)

    tokens = history.numpy()
    for slot in np.flatnonzero(admit_generation.numpy() >= 0):
        given, end = int(admit_given_len[slot]), int(admit_prompt_len[slot])
        counts[slot] = 0
        counts[slot, tokens[slot, :given]] = IN_PROMPT
        np.add.at(counts[slot], tokens[slot, given:end], 1)
