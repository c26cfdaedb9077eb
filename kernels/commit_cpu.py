"""Acceptance and state update on the CPU: see `ops.commit`."""

from __future__ import annotations

import numpy as np
from torch import Tensor


def commit(
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
    row_slot = slot_of_row.numpy()
    state_finish = finish.numpy()
    used = row_slot >= 0
    row = np.flatnonzero(used & (state_finish[np.maximum(row_slot, 0)] == 0))  # live rows
    slot = row_slot[row]
    places = np.arange(out_tokens.shape[1])  # [1+K]
    num_drafts = len(places) - 1

    # Tokens at the logits places of each live row: [rows, 1+K].
    count = logits_count.numpy()[row, None]
    exists = places < count
    index = np.where(exists, logits_start.numpy()[row, None] + places, 0)
    token = np.where(exists, sampled.numpy()[index], -1)

    # How a place would end the request: error before stop token before length.
    length = seq_len.numpy()[slot, None] + places + 1
    stopped = (token[:, :, None] == stop_tokens.numpy()[slot, None, :]).any(-1)
    ending = np.where(length >= stop_len.numpy()[slot, None], 2, 0)
    ending = np.where(stopped, 1, ending)
    ending = np.where(token < 0, 3, ending)

    # A place counts while every place before it was an accepted draft that ended nothing.
    reached = exists
    accepted = (ending == 0) & exists
    accepted = accepted[:, :-1] & (token[:, :-1] == draft_tokens.numpy()[slot, :num_drafts])
    reached[:, 1:] &= np.logical_and.accumulate(accepted, axis=1)
    emitted = reached & (token >= 0)

    emitted_count = emitted.sum(1)
    at_row, at_place = np.nonzero(emitted)
    tokens = token[at_row, at_place]
    history.numpy()[slot[at_row], length[at_row, at_place] - 1] = tokens

    new_length = seq_len.numpy()[slot] + emitted_count
    context = context_len.numpy()
    context[slot] = np.where(
        count[:, 0] > 0, new_length - 1, context[slot] + token_count.numpy()[row]
    )
    seq_len.numpy()[slot] = new_length
    state_finish[slot] = np.where(reached, ending, 0).max(1)
    draft_count.numpy()[slot] = 0

    out_slot.numpy()[:] = row_slot
    for out, state, padding in (
        (out_generation, generation.numpy(), -1),
        (out_finish, state_finish, 4),
        (out_context_len, context, 0),
    ):
        out.numpy()[:] = np.where(used, state[row_slot], padding)
    out_count.fill_(0)
    out_count.numpy()[row] = emitted_count
    out_tokens.fill_(-1)
    out_tokens.numpy()[row[at_row], at_place] = tokens
