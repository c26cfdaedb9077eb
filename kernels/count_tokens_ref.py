"""Oracle of `ops.count_tokens`: one token at a time."""

from __future__ import annotations

from torch import Tensor

PROMPT = 1 << 30


def count_tokens_ref(
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
    for row, slot in enumerate(emitted_slot.tolist()):
        if slot >= 0:
            for token in emitted_tokens[row, : int(emitted_count[row])].tolist():
                occurrences[slot, token] += 1
    for slot, generation in enumerate(admit_generation.tolist()):
        if generation >= 0:
            tokens = history[slot, : int(admit_prompt_len[slot])].tolist()
            given = int(admit_given_len[slot])
            for token in range(occurrences.shape[1]):
                in_prompt = PROMPT if token in tokens[:given] else 0
                occurrences[slot, token] = in_prompt + tokens[given:].count(token)
