"""Metadata of a step on the CPU: see `ops.prepare`.

Only tokens that exist are computed; every other place holds the padding value that each
output is first filled with. A row's range needs no reduction over its tokens: visible ranges
grow with the position, so the first token has the smallest start and the last the largest end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Shard:
    """Positions that one rank holds: blocks of `interleave` tokens, round robin."""

    size: int
    rank: int
    interleave: int

    def local_length(self, length: Array) -> Array:
        """How many of the first `length` tokens this rank holds."""
        if self.size == 1:
            return length
        rounds, rest = np.divmod(length, self.size * self.interleave)
        own = np.minimum(np.maximum(rest - self.rank * self.interleave, 0), self.interleave)
        return rounds * self.interleave + own

    def local_position(self, position: Array) -> tuple[Array, Array | bool]:
        """Index of each position among its owner's entries, and whether this rank is the owner."""
        if self.size == 1:
            return position, True
        block, offset = np.divmod(position, self.interleave)
        rounds, owner = np.divmod(block, self.size)
        return rounds * self.interleave + offset, owner == self.rank


def _spread(count: Array) -> tuple[Array, Array]:
    """For counts [n]: owner index and offset of each of the count.sum() entries, in order."""
    owner = np.repeat(np.arange(len(count)), count)
    first = np.cumsum(count) - count
    return owner, np.arange(len(owner)) - first[owner]


def _prefix_sum(count: Array, out: Array) -> None:
    """Exclusive prefix sum of counts [n] into out [n+1]."""
    out[0] = 0
    np.cumsum(count, out=out[1:])


def _write_items(items: Array, key: Array, count: Array, *, descending: bool) -> int:
    """Fill a work list: count[row] adjacent items per row, rows by descending key, then by row."""
    order = np.argsort(-key, kind="stable")
    owner, offset = _spread(count[order])
    row = order[owner]
    total = len(row)
    items[total:] = -1
    items[:total, 0] = row
    items[:total, 1] = count[row] - 1 - offset if descending else offset
    return total


def prepare(
    slot_of_row: Tensor,
    query_len: Tensor,
    context_len: Tensor,
    seq_len: Tensor,
    prompt_len: Tensor,
    finish: Tensor,
    history: Tensor,
    draft_tokens: Tensor,
    draft_count: Tensor,
    page_table: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    row_of_token: Tensor,
    kv_slot: Tensor,
    visible_start: Tensor,
    visible_end: Tensor,
    query_start: Tensor,
    token_count: Tensor,
    logits_start: Tensor,
    logits_count: Tensor,
    logits_token: Tensor,
    row_begin: Tensor,
    row_end: Tensor,
    row_chunk: Tensor,
    row_splits: Tensor,
    decode_items: Tensor,
    decode_count: Tensor,
    prefill_items: Tensor,
    prefill_count: Tensor,
    windows: list[int],
    max_drafts: int,
    page_size: int,
    dcp_size: int,
    dcp_rank: int,
    interleave: int,
    align: int,
    chunk: int,
    max_splits: int,
    prefill_block: int,
) -> None:
    """Derive tokens, visible ranges, logits places and work lists of a step."""
    shard = _Shard(dcp_size, dcp_rank, interleave)
    max_seq_len = history.shape[1]

    # Rows.
    row_slot = slot_of_row.numpy()
    slot = np.maximum(row_slot, 0)
    live = (row_slot >= 0) & (finish.numpy()[slot] == 0)
    places = query_len.numpy().astype(np.int64)
    context = context_len.numpy()[slot].astype(np.int64)
    seq = seq_len.numpy()[slot]
    available = np.minimum(seq + draft_count.numpy()[slot], max_seq_len) - context
    count = np.where(live, np.minimum(np.maximum(available, 0), places), 0)
    end = context + count
    token_count.numpy()[:] = count
    start = query_start.numpy()
    _prefix_sum(places, start)

    # Tokens.
    place_row = row_of_token.numpy()
    place_row.fill(-1)
    place_row[: start[-1]] = np.repeat(np.arange(len(slot)), places)
    row, offset = _spread(count)
    token = start[row] + offset
    position = context[row] + offset
    token_slot = slot[row]
    ids = history.numpy()[token_slot, position]
    draft = position - seq[row]
    is_draft = draft >= 0
    if is_draft.any():
        ids[is_draft] = draft_tokens.numpy()[token_slot[is_draft], draft[is_draft]]
    local, owned = shard.local_position(position)
    page = page_table.numpy()[token_slot, local // page_size].astype(np.int64)
    for out, value, padding in (
        (input_ids, ids, 0),
        (positions, position, 0),
        (kv_slot, np.where(owned, page * page_size + local % page_size, -1), -1),
        (visible_end, shard.local_length(position + 1), 0),
    ):
        array = out.numpy()
        array.fill(padding)
        array[token] = value

    # Logits.
    first = logits_start.numpy()
    _prefix_sum(np.minimum(places, 1 + max_drafts), first)
    reaches = (count > 0) & (end >= seq)
    wanted = np.where(reaches, end - (seq - 1), 0)
    logits_count.numpy()[:] = wanted
    row, offset = _spread(wanted)
    array = logits_token.numpy()
    array.fill(0)
    array[first[row] + offset] = (start[:-1] + seq - 1 - context)[row] + offset

    # Ranges and work lists.
    prefill = np.where(live, context < prompt_len.numpy()[slot], places > 1 + max_drafts)
    prefill &= places > 0
    decode = ~prefill & (places > 0)
    last = np.where(count > 0, shard.local_length(end), 0)
    row_end.numpy()[:] = last
    blocks = np.where(prefill, -(-places // prefill_block), 0)
    prefill_count.numpy()[0] = _write_items(prefill_items.numpy(), last, blocks, descending=True)
    starts = visible_start.numpy()
    starts.fill(0)
    for g, window in enumerate(windows):
        begin = np.zeros_like(last)
        if window:
            starts[g, token] = shard.local_length(np.maximum(position + 1 - window, 0))
            begin = shard.local_length(np.maximum(context + 1 - window, 0))
            begin = np.where(count > 0, begin // align * align, 0)
        row_begin.numpy()[g] = begin
        span = np.maximum(last - begin, 0)
        size = _chunk_size(span, chunk, max_splits)
        row_chunk.numpy()[g] = size
        splits = np.where(decode, np.maximum(-(-span // size), 1), 0)
        row_splits.numpy()[g] = splits
        work = np.minimum(span, size)
        decode_count.numpy()[g] = _write_items(
            decode_items.numpy()[g], work, splits, descending=False
        )


def _chunk_size(span: Array, chunk: int, max_splits: int) -> Array:
    """Smallest chunk * 2**n that covers each span [n] in at most `max_splits` chunks."""
    quotient = -(-span // (chunk * max_splits))
    doublings = np.frexp(np.maximum(quotient - 1, 0).astype(np.float64))[1]  # bit length
    return np.int64(chunk) << doublings.astype(np.int64)
