"""Oracle of `ops.commit`: one row and one token at a time."""

from __future__ import annotations

from torch import Tensor


def commit_ref(
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
    """Accept drafts, append emitted tokens, end requests, fill the output block."""
    for row, slot in enumerate(slot_of_row.tolist()):
        emitted: list[int] = []
        if slot >= 0 and int(finish[slot]) == 0:
            if int(logits_count[row]) == 0:
                context_len[slot] += int(token_count[row])
            else:
                begin = int(logits_start[row])
                samples = sampled[begin : begin + int(logits_count[row])].tolist()
                for i, token in enumerate(samples):
                    if token == -1:
                        finish[slot] = 3
                        break
                    emitted.append(token)
                    history[slot, int(seq_len[slot])] = token
                    seq_len[slot] += 1
                    if token in stop_tokens[slot].tolist():
                        finish[slot] = 1
                    elif int(seq_len[slot]) >= int(stop_len[slot]):
                        finish[slot] = 2
                    if int(finish[slot]) != 0:
                        break
                    if i + 1 < len(samples) and token != int(draft_tokens[slot, i]):
                        break
                context_len[slot] = int(seq_len[slot]) - 1
            draft_count[slot] = 0
        out_slot[row] = slot
        out_generation[row] = int(generation[slot]) if slot >= 0 else -1
        out_count[row] = len(emitted)
        out_finish[row] = int(finish[slot]) if slot >= 0 else 4
        out_context_len[row] = int(context_len[slot]) if slot >= 0 else 0
        for i in range(out_tokens.shape[1]):
            out_tokens[row, i] = emitted[i] if i < len(emitted) else -1
