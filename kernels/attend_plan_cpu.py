"""What attention on the CPU computes together: a step's query places, cut into groups of items.

An *item* is at most `_MAX_QUERIES` adjacent query places of one row with the KV positions that any
of them sees. Items of equal query count and similar span form a group, which is computed KV chunk
by KV chunk, so that cost follows the visible ranges and temporaries stay near `_MAX_ELEMENTS`.
Positions that pad an item to the span of its group load the item's own last visible entry: nothing
invisible to all of its queries is ever read, so NaN there needs no care.

All layers of a step share one plan (the groups, the addresses, the masks). It is a pure function
of the *contents* of the metadata, hence remembered by content.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

_MAX_QUERIES = 128  # query places of an item: bounds the waste above the causal diagonal
_MAX_ELEMENTS = 1 << 22  # of one temporary (16 MiB in fp32)
_MAX_PLACES = 1 << 14  # query places times query heads of a group
_SPAN_SLACK = 128  # positions of padding that are cheaper than another group


@dataclass(frozen=True, slots=True)
class Item:
    """`count` query places from `first`, and the union [begin, end) of what they see."""

    first: int
    count: int
    row: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Addresses and mask of n KV positions of every item of a group."""

    entry: Tensor  # [R * Hkv * n] int64, of a pool seen as [num_pages * Hkv * page_size, D]
    hidden: Tensor | None  # [R, 1, 1, J, n] bool, True = not visible; None = all visible


@dataclass(frozen=True, slots=True)
class Group:
    """R items of J queries each."""

    places: slice | Tensor  # the R * J query places, item by item
    num_items: int
    num_places: int
    chunks: tuple[Chunk, ...]


def plan(
    slot_of_row: Tensor,
    query_start: Tensor,
    visible_start: Tensor,
    visible_end: Tensor,
    page_table: Tensor,
    *,
    page_size: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> tuple[Group, ...]:
    """The groups of a step, from its int32 metadata. Places in no group see nothing."""
    last = visible_end.numpy()
    width = -(-int(last.max(initial=0)) // page_size)  # columns beyond it are nobody's
    return _plan(
        slot_of_row.numpy().tobytes(),
        query_start.numpy().tobytes(),
        visible_start.numpy().tobytes(),
        last.tobytes(),
        page_table.numpy()[:, :width].tobytes(),
        width,
        page_size,
        num_q_heads,
        num_kv_heads,
        head_dim,
    )


@lru_cache(maxsize=4)  # a step of a model with several windows alternates between their plans
def _plan(
    slot_of_row: bytes,
    query_start: bytes,
    visible_start: bytes,
    visible_end: bytes,
    page_table: bytes,
    num_columns: int,
    page_size: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> tuple[Group, ...]:
    """The groups, from the bytes of the metadata."""
    if num_columns == 0:
        return ()
    slots, starts, lows, ends = (
        np.frombuffer(x, np.int32).astype(np.int64)
        for x in (slot_of_row, query_start, visible_start, visible_end)
    )
    pages = np.frombuffer(page_table, np.int32).reshape(-1, num_columns)
    heads = np.arange(num_kv_heads) * page_size

    def build(items: list[Item]) -> Group:
        R, J = len(items), items[0].count
        places = np.concatenate([np.arange(i.first, i.first + J) for i in items])
        slot = slots[[i.row for i in items]][:, None]  # [R, 1]
        begin = np.array([i.begin for i in items])[:, None]
        end = np.array([i.end for i in items])[:, None]
        low, high = lows[places].reshape(R, J, 1), ends[places].reshape(R, J, 1)
        span = int((end - begin).max())
        step = _MAX_ELEMENTS // (R * max(J * num_q_heads, head_dim * num_kv_heads))
        chunks = []
        for at in range(0, span, max(step, page_size)):
            c = begin + np.arange(at, min(at + max(step, page_size), span))  # [R, n]
            shown = (low <= c[:, None]) & (c[:, None] < high)
            c = np.minimum(c, end - 1)
            page = pages[slot, c // page_size].astype(np.int64)
            entry = page * (num_kv_heads * page_size) + c % page_size
            chunks.append(
                Chunk(
                    entry=torch.from_numpy((entry[:, None] + heads[:, None]).reshape(-1)),
                    hidden=None if shown.all() else torch.from_numpy(~shown[:, None, None]),
                )
            )
        adjacent = bool((np.diff(places) == 1).all())
        return Group(
            places=slice(int(places[0]), int(places[-1]) + 1)
            if adjacent
            else torch.from_numpy(places),
            num_items=R,
            num_places=R * J,
            chunks=tuple(chunks),
        )

    items = _items(starts.tolist(), lows, ends)
    return tuple(build(group) for group in _grouped(items, max_places=_MAX_PLACES // num_q_heads))


def _items(starts: list[int], lows: np.ndarray, ends: np.ndarray) -> Iterator[Item]:
    """Blocks of query places that see anything."""
    for row, (row_first, row_last) in enumerate(pairwise(starts)):
        for first in range(row_first, row_last, _MAX_QUERIES):
            last = min(first + _MAX_QUERIES, row_last)
            low, end = lows[first:last], ends[first:last]
            sees = low < end
            if sees.any():
                yield Item(first, last - first, row, int(low[sees].min()), int(end.max()))


def _grouped(items: Iterable[Item], max_places: int) -> Iterator[list[Item]]:
    """Items of equal count, padded to at most about twice their span."""
    group: list[Item] = []
    for item in sorted(items, key=lambda i: (i.count, i.begin - i.end, i.first)):
        if group:
            longest, span = group[0].end - group[0].begin, item.end - item.begin
            if (
                item.count != group[0].count
                or longest > 2 * span + _SPAN_SLACK
                or (len(group) + 1) * item.count > max_places
            ):
                yield group
                group = []
        group.append(item)
    if group:
        yield group
