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
        held: Array = rounds * self.interleave + own
        return held

    def local_position(self, position: Array) -> tuple[Array, Array | bool]:
        """Index of each position among its owner's entries, and whether this rank is the owner."""
        if self.size == 1:
            return position, True
        block, offset = np.divmod(position, self.interleave)
        rounds, owner = np.divmod(block, self.size)
        return rounds * self.interleave + offset, owner == self.rank


def _spread(count: Array) -> tuple[Array, Array]:
    """For counts [n]: owner index and offset of each of the count.sum() entries, in order."""
    owner = np.arange(len(count)).repeat(count)
    first = count.cumsum() - count
    return owner, np.arange(len(owner)) - first[owner]


def _prefix_sum(count: Array, out: Array) -> None:
    """Exclusive prefix sum of counts [n] into out [n+1]."""
    out[0] = 0
    out[1:] = count.cumsum()


def _write_items(items: Array, key: Array, count: Array) -> int:
    """Fill a work list: count[row] adjacent items per row, rows by descending key, then by row."""
    order = (-key).argsort(kind="stable")
    index, offset = _spread(count[order])
    total = len(index)
    items[:total, 0] = order[index]
    items[:total, 1] = offset
    items[total:] = -1
    return total


def _chunk_size(span: Array, chunk: int, max_splits: int) -> Array:
    """Smallest chunk * 2**n that covers each span in at most `max_splits` chunks."""
    quotient = -(-span // (chunk * max_splits))
    doublings = np.frexp(np.maximum(quotient - 1, 0).astype(np.float64))[1]  # bit length
    size: Array = np.int64(chunk) << doublings.astype(np.int64)
    return size


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
    slot = np.maximum(row_slot, 0).astype(np.int64)
    live = (row_slot >= 0) & (finish.numpy()[slot] == 0)
    places = query_len.numpy().astype(np.int64)
    context = context_len.numpy()[slot].astype(np.int64) * live
    seq = seq_len.numpy()[slot].astype(np.int64)
    available = np.minimum(seq + draft_count.numpy()[slot], max_seq_len) - context
    count = np.minimum(np.maximum(available, 0), places) * live
    some = count > 0
    end = context + count
    token_count.numpy()[:] = count
    start = query_start.numpy()
    _prefix_sum(places, start)

    # Tokens.
    place_row = row_of_token.numpy()
    place_row.fill(-1)
    place_row[: start[-1]] = np.arange(len(slot)).repeat(places)
    row, offset = _spread(count)
    token = offset + start[row]
    token_slot = slot[row]
    position = context[row] + offset
    ids = history.numpy()[token_slot, position]
    draft = position - seq[row]
    is_draft = draft >= 0
    if is_draft.any():
        ids[is_draft] = draft_tokens.numpy()[token_slot[is_draft], draft[is_draft]]
    local, owned = shard.local_position(position)
    column, entry = np.divmod(local, page_size)
    flat = page_table.numpy()[token_slot, column].astype(np.int64) * page_size + entry
    _scatter(input_ids, token, ids, padding=0)
    _scatter(positions, token, position, padding=0)
    _scatter(kv_slot, token, np.where(owned, flat, -1), padding=-1)
    _scatter(visible_end, token, shard.local_length(position + 1), padding=0)

    # Logits: those of the last token of the sequence and of the drafts after it.
    first = logits_start.numpy()
    _prefix_sum(np.minimum(places, 1 + max_drafts), first)
    logits_count.numpy()[:] = np.maximum(end - (seq - 1), 0) * some
    index = first[row] + (draft + 1)
    wanted = draft >= -1
    _scatter(logits_token, index[wanted], token[wanted], padding=0)

    # Ranges, for all windows at once: [G, tokens] and [G, B]. Window 0 reaches to any start.
    window = np.array([[w or max_seq_len] for w in windows])
    _scatter(
        visible_start,
        (slice(None), token),
        shard.local_length(np.maximum(position + 1 - window, 0)),
        padding=0,
    )
    begin = shard.local_length(np.maximum(context + 1 - window, 0)) // align * align * some
    last = shard.local_length(end) * some
    span = np.maximum(last - begin, 0)
    size = _chunk_size(span, chunk, max_splits)
    row_begin.numpy()[:] = begin
    row_end.numpy()[:] = last
    row_chunk.numpy()[:] = size

    # Work lists.
    prefill = np.where(live, context < prompt_len.numpy()[slot], places > 1 + max_drafts)
    splits = np.maximum(-(-span // size), 1) * (~prefill & (places > 0))
    row_splits.numpy()[:] = splits
    work = np.minimum(span, size)
    for g, items in enumerate(decode_items.numpy()):
        decode_count.numpy()[g] = _write_items(items, work[g], splits[g])
    blocks = -(-places // prefill_block) * prefill
    items = prefill_items.numpy()
    total = _write_items(items, last, blocks)
    prefill_count.numpy()[0] = total
    items[:total, 1] = blocks[items[:total, 0]] - 1 - items[:total, 1]  # longest first


def _scatter(out: Tensor, index: Any, value: Array, *, padding: int) -> None:
    """Rewrite `out`: value at index, padding everywhere else."""
    array = out.numpy()
    array.fill(padding)
    array[index] = value
