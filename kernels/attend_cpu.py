"""Paged attention on the CPU: vectorised eager torch.

The query places of a step become *items*: at most `_MAX_QUERIES` adjacent places of one row with
the KV positions that any of them sees. Items of equal query count and similar span form a group
and are computed together, KV chunk by KV chunk, which are then joined:

    s = scale * (q . k)    [R*Hkv, G*J, n]    R items, G query heads per KV head,
    m = max s                                 J queries, n positions of a chunk
    l = sum exp(s - m)
    o = exp(s - m) @ v     [R*Hkv, G*J, D]

so that cost follows the visible ranges and temporaries stay near `_MAX_ELEMENTS`. Positions that
pad an item to the span of its group load the item's own last visible entry: nothing invisible to
all of its queries is ever read, so NaN there needs no care.

All layers of a step share one plan (the groups, the addresses, the masks). It is a pure function
of the *contents* of the metadata, hence remembered by content.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_MAX_QUERIES = 128  # query places of an item: bounds the waste above the causal diagonal
_MAX_ELEMENTS = 1 << 22  # of one temporary (16 MiB in fp32)
_MAX_PLACES = 1 << 14  # query places times query heads of a group
_SPAN_SLACK = 128  # positions of padding that are cheaper than another group
_LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True, slots=True)
class _Item:
    """`count` query places from `first`, and the union [begin, end) of what they see."""

    first: int
    count: int
    row: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Addresses and mask of n KV positions of every item of a group."""

    entry: Tensor  # [R * Hkv * n] int64, of a pool seen as [num_pages * Hkv * page_size, D]
    hidden: Tensor | None  # [R, 1, 1, J, n] bool, True = not visible; None = all visible


@dataclass(frozen=True, slots=True)
class _Group:
    """R items of J queries each."""

    places: slice | Tensor  # the R * J query places, item by item
    num_items: int
    num_places: int
    chunks: tuple[_Chunk, ...]


def attend(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    slot_of_row: Tensor,
    query_start: Tensor,
    visible_start: Tensor,
    visible_end: Tensor,
    row_begin: Tensor,
    row_end: Tensor,
    row_chunk: Tensor,
    row_splits: Tensor,
    decode_items: Tensor,
    decode_count: Tensor,
    prefill_items: Tensor | None,
    prefill_count: Tensor | None,
    sinks: Tensor | None,
    partial_out: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float,
    decode_query_len: int,
    prefill_block: int,
) -> None:
    """CPU implementation of `ops.attend`; see there for shapes.

    Decode and prefill rows take the same path. Partials and work lists, which balance the
    programs of a GPU, are not used.
    """
    num_kv_heads, page_size = k_pool.shape[1:3]
    last = visible_end.numpy()
    width = -(-int(last.max(initial=0)) // page_size)  # columns beyond it are nobody's
    groups = _plan(
        slot_of_row.numpy().tobytes(),
        query_start.numpy().tobytes(),
        visible_start.numpy().tobytes(),
        last.tobytes(),
        page_table.numpy()[:, :width].tobytes(),
        width,
        page_size,
        q.shape[1],
        num_kv_heads,
        q.shape[2],
    )
    if sum(group.num_places for group in groups) < q.shape[0]:
        out.zero_()
        lse.fill_(-math.inf)
        if sinks is not None:
            lse[: int(query_start[-1])] = sinks
    for group in groups:
        group_out, group_lse = _attend_group(q, k_pool, v_pool, group, scale, softcap)
        if sinks is not None:
            with_sinks = torch.logaddexp(group_lse, sinks)
            group_out *= (group_lse - with_sinks).exp_().unsqueeze(-1)
            group_lse = with_sinks
        out[group.places] = group_out.to(out.dtype)
        lse[group.places] = group_lse


class _Part(NamedTuple):
    """Attention over some of the positions: maximum, sum and values of the exponentials."""

    m: Tensor  # [R * Hkv, G * J, 1]
    l: Tensor  # [R * Hkv, G * J, 1]
    o: Tensor  # [R * Hkv, G * J, D]


def _attend_group(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, group: _Group, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """out [R * J, Hq, D] and lse [R * J, Hq] of a group, both fp32, without sinks."""
    q = q[group.places].float() * scale
    Hq, D = q.shape[1:]
    Hkv, R = k_pool.shape[1], group.num_items
    G, J = Hq // Hkv, q.shape[0] // R
    if J > 1:  # one query per item lies by head already
        q = q.view(R, J, Hkv, G, D).permute(0, 2, 3, 1, 4)
    q = q.reshape(R * Hkv, G * J, D)
    parts = (_attend_chunk(q, k_pool, v_pool, c, (R, Hkv, G, J), softcap) for c in group.chunks)
    m, l, o = reduce(_join, parts)
    o /= l.clamp_min(1.0)  # the largest term is exp(0), so l >= 1 unless nothing is visible
    m += l.log_()
    if J == 1:
        return o.view(R, Hq, D), m.view(R, Hq)
    return _by_place(o, R, Hkv, G), _by_place(m, R, Hkv, G).squeeze(-1)


def _attend_chunk(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    chunk: _Chunk,
    shape: tuple[int, int, int, int],
    softcap: float,
) -> _Part:
    """q [R * Hkv, G * J, D], scaled; `shape` is (R, Hkv, G, J)."""
    k = _gather(k_pool, chunk.entry).view(q.shape[0], -1, q.shape[2])
    s = torch.bmm(q, k.transpose(1, 2))
    if softcap > 0.0:
        s.div_(softcap).tanh_().mul_(softcap)
    if chunk.hidden is not None:
        s.view(*shape, -1).masked_fill_(chunk.hidden, -math.inf)
    # A query that sees nothing here gets a finite maximum: exp(-inf - lowest) is 0.
    m = s.amax(-1, keepdim=True).clamp_min_(_LOWEST)
    p = s.sub_(m).exp_()
    v = _gather(v_pool, chunk.entry).view(k.shape)
    return _Part(m, p.sum(-1, keepdim=True), torch.bmm(p, v))


def _join(a: _Part, b: _Part) -> _Part:
    """Attention over the union of the positions of `a` and `b`."""
    m = torch.maximum(a.m, b.m)
    wa, wb = (a.m - m).exp_(), (b.m - m).exp_()
    return _Part(m, a.l * wa + b.l * wb, a.o.mul_(wa).addcmul_(b.o, wb))


def _by_place(x: Tensor, R: int, Hkv: int, G: int) -> Tensor:
    """[R * Hkv, G * J, n] -> [R * J, Hkv * G, n]"""
    x = x.view(R, Hkv, G, -1, x.shape[-1]).permute(0, 3, 1, 2, 4)
    return x.reshape(-1, Hkv * G, x.shape[-1])


def _gather(pool: Tensor, entry: Tensor) -> Tensor:
    """Entries [n, D] of a pool, fp32."""
    if pool.is_contiguous():
        return pool.view(-1, pool.shape[-1]).index_select(0, entry).float()
    head, offset = entry // pool.shape[2] % pool.shape[1], entry % pool.shape[2]
    return pool[entry // (pool.shape[1] * pool.shape[2]), head, offset].float()


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
) -> tuple[_Group, ...]:
    """The groups of a step, from the bytes of its int32 metadata."""
    if num_columns == 0:
        return ()
    slots, starts, lows, ends = (
        np.frombuffer(x, np.int32).astype(np.int64)
        for x in (slot_of_row, query_start, visible_start, visible_end)
    )
    pages = np.frombuffer(page_table, np.int32).reshape(-1, num_columns)
    heads = np.arange(num_kv_heads) * page_size

    def build(items: list[_Item]) -> _Group:
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
                _Chunk(
                    entry=torch.from_numpy((entry[:, None] + heads[:, None]).reshape(-1)),
                    hidden=None if shown.all() else torch.from_numpy(~shown[:, None, None]),
                )
            )
        adjacent = bool((np.diff(places) == 1).all())
        return _Group(
            places=slice(int(places[0]), int(places[-1]) + 1)
            if adjacent
            else torch.from_numpy(places),
            num_items=R,
            num_places=R * J,
            chunks=tuple(chunks),
        )

    items = _items(starts.tolist(), lows, ends)
    return tuple(build(group) for group in _grouped(items, max_places=_MAX_PLACES // num_q_heads))


def _items(starts: list[int], lows: np.ndarray, ends: np.ndarray) -> Iterator[_Item]:
    """Blocks of query places that see anything."""
    for row, (row_first, row_last) in enumerate(pairwise(starts)):
        for first in range(row_first, row_last, _MAX_QUERIES):
            last = min(first + _MAX_QUERIES, row_last)
            low, end = lows[first:last], ends[first:last]
            sees = low < end
            if sees.any():
                yield _Item(first, last - first, row, int(low[sees].min()), int(end.max()))


def _grouped(items: Iterable[_Item], max_places: int) -> Iterator[list[_Item]]:
    """Items of equal count, padded to at most about twice their span."""
    group: list[_Item] = []
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
