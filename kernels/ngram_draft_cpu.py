"""Prompt lookup on the CPU: see `ops.ngram_draft`."""

from __future__ import annotations

import numpy as np
from torch import Tensor


def _latest_match(tokens: np.ndarray, min_match: int, max_match: int) -> int:
    """End of the latest earlier occurrence of the longest tail of `tokens` [n], 0 without one."""
    latest = 0
    # Every place where an occurrence of the last n tokens ends, for n = 1, 2, ...: few are left
    # after the first comparison, which is the only one over the whole history.
    ends = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1
    for n in range(1, max_match + 1):
        if n > 1:
            ends = ends[int(ends[0] < n) :]  # in order and distinct: only the first is too early
            ends = ends[tokens[ends - n] == tokens[-n]]
        if len(ends) == 0:
            break
        if n >= min_match:
            latest = int(ends[-1])
    return latest


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
    """Draft what followed the latest earlier occurrence of the last tokens of each slot."""
    tokens, drafts, counts = history.numpy(), draft_tokens.numpy(), draft_count.numpy()
    lengths, stops = seq_len.numpy(), stop_len.numpy()
    counts[:] = 0
    decoding = (finish.numpy() == 0) & (context_len.numpy() == lengths - 1) & (lengths > 1)
    # One token is emitted in any case, so a draft never reaches the place before the stop.
    room = np.minimum(stops - lengths - 1, tokens.shape[1] - lengths)
    room = np.minimum(room, drafts.shape[1])
    for slot in np.flatnonzero(decoding & (room > 0)).tolist():
        length = int(lengths[slot])
        end = _latest_match(tokens[slot, :length], min_match, max_match)
        if end > 0:
            count = int(room[slot])
            drafts[slot, :count] = tokens[slot, end + np.arange(count) % (length - end)]
            counts[slot] = count
