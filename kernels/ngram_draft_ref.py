"""Oracle of `ops.ngram_draft`: every length, every start, on Python lists."""

from __future__ import annotations

from torch import Tensor


def _continuation(tokens: list[int], min_match: int, max_match: int) -> list[int]:
    """What followed the latest earlier occurrence of the longest tail that has one."""
    for n in range(max_match, min_match - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[len(tokens) - n :]:
                return tokens[start + n :]
    return []


def ngram_draft_ref(
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
    for slot, row in enumerate(history.tolist()):
        draft_count[slot] = 0
        length = int(seq_len[slot])
        if int(finish[slot]) != 0 or int(context_len[slot]) != length - 1:
            continue
        follows = _continuation(row[:length], min_match, max_match)
        for i in range(draft_tokens.shape[1] if follows else 0):
            # Drafts have a place in the history, and the last place before the stop is left to
            # the token that is emitted after them.
            if length + i >= len(row) or length + i + 1 >= int(stop_len[slot]):
                break
            draft_tokens[slot, i] = follows[i]
            follows.append(follows[i])
            draft_count[slot] = i + 1
