"""The page allocator against a naive model, and what it costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from graphattn.bounds import Bounds, kv_place, prefix_unit
from graphattn.models.contract import AttentionLayer
from graphattn.pages import KVPools, PageAllocator, page_bytes

BOUNDS = Bounds(
    max_batch=4, max_seq_len=40, max_tokens=16, page_size=4, num_pages=12, vocab_size=10
)


BOUNDS_DCP = replace(BOUNDS, dcp_size=2, interleave=6, num_pages=16)


class AllocatorMachine(RuleBasedStateMachine):
    """Random requests of few distinct tokens; the model knows what every page holds.

    `content[page]` are the tokens up to its last position, as a request that wrote it knew them:
    whoever finds the page must have the same.
    """

    bounds = BOUNDS
    lookahead: int | None = 0

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(self.bounds, lookahead=self.lookahead)
        self.unit = prefix_unit(self.bounds.page_size, self.bounds.dcp_size, self.bounds.interleave)
        self.tokens: dict[int, list[int]] = {}  # by slot
        self.written: dict[int, int] = {}
        self.table: dict[int, dict[int, int]] = {}  # what a device page table would hold
        self.content: dict[int, tuple[int, ...]] = {}

    @rule(slot=st.integers(0, 3), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=40))
    def admit(self, slot: int, tokens: list[int]) -> None:
        if slot in self.tokens:
            return
        before = self.pages.available
        prefix = self.pages.find(tokens)
        price = self.pages.price(prefix, len(tokens))
        if price > before:
            return
        assert prefix.length % self.unit == 0
        assert prefix.length < len(tokens)
        updates = self.pages.open(slot, prefix)
        assert [u.column for u in updates] == list(range(self.bounds.pages_for(prefix.length)))
        for update in updates:
            known = self.content[update.page]
            assert known == tuple(tokens[: len(known)]), "another request's KV was found"
        updates += self.pages.grow(slot, len(tokens))
        assert self.pages.available == before - price
        self.tokens[slot], self.written[slot] = tokens, prefix.length
        self.table[slot] = {u.column: u.page for u in updates}
        assert len(self.table[slot]) == len(updates) == self.bounds.pages_for(len(tokens))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        """A launched step writes some tokens."""
        slot = data.draw(st.sampled_from(sorted(self.tokens)))
        tokens = self.tokens[slot]
        length = data.draw(st.integers(self.written[slot], len(tokens)))
        others = {p for s, t in self.table.items() if s != slot for p in t.values()}
        for p in range(self.written[slot], length):
            page = self.table[slot][kv_column(p, self.bounds)]
            assert page not in others, "a shared page is written"
            self.content[page] = tuple(tokens[: p + 1])
        self.written[slot] = length
        known = len(tokens)
        if self.pages.completes(slot, length, known):
            self.pages.publish(slot, tokens, length)
        assert not self.pages.completes(slot, length, known)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def extend(self, data: st.DataObject, more: list[int]) -> None:
        """A request emits tokens."""
        slot = data.draw(st.sampled_from(sorted(self.tokens)))
        tokens = [*self.tokens[slot], *more][:40]
        missing = self.pages.missing(slot, len(tokens))
        if missing > self.pages.available:
            return
        for update in self.pages.grow(slot, len(tokens)):
            assert update.column not in self.table[slot], "a column is set once"
            self.table[slot][update.column] = update.page
        self.tokens[slot] = tokens

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), poisoned=st.booleans())
    def release(self, data: st.DataObject, poisoned: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.tokens)))
        before, yields = self.pages.available, self.pages.yields(slot)
        if poisoned:
            self.pages.retract(slot)
            assert not self.pages.find([*self.tokens[slot], 0]).length
        self.pages.release(slot)
        assert self.pages.available >= before + yields
        del self.tokens[slot], self.written[slot], self.table[slot]

    @rule()
    def forget(self) -> None:
        self.pages.forget()
        assert self.pages.cached == 0

    @invariant()
    def pages_add_up(self) -> None:
        held = {page for table in self.table.values() for page in table.values()}
        assert self.pages.taken == len(held)
        assert self.pages.free + self.pages.cached + len(held) == self.bounds.num_pages
        assert self.pages.available == self.pages.free + self.pages.cached
        for slot, table in self.table.items():
            assert self.pages.pages_of(slot) == tuple(table[i] for i in range(len(table)))


def kv_column(p: int, bounds: Bounds) -> int:
    return kv_place(p, bounds.dcp_size, bounds.interleave, bounds.page_size).column


class ShardedMachine(AllocatorMachine):
    """Units of several pages: two ranks, blocks that do not divide a page."""

    bounds = BOUNDS_DCP


class LookaheadMachine(AllocatorMachine):
    """Entries that depend on the token after them."""

    lookahead = 1


class PrivateMachine(AllocatorMachine):
    """Nothing is shared."""

    lookahead = None


CALM = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAllocator, TestSharded = AllocatorMachine.TestCase, ShardedMachine.TestCase
TestLookahead, TestPrivate = LookaheadMachine.TestCase, PrivateMachine.TestCase
for case in (TestAllocator, TestSharded, TestLookahead, TestPrivate):
    case.settings = CALM


@pytest.mark.parametrize(
    ("W", "I", "page_size", "shared", "found"),
    [(2, 1, 64, 150, 128), (2, 64, 16, 32, 0), (1, 1, 16, 150, 144), (2, 64, 16, 150, 128)],
)
def test_prefixes_are_found_in_whole_units(
    W: int, I: int, page_size: int, shared: int, found: int
) -> None:
    """Elsewhere a hit was counted in local pages, and the shared page written by both."""
    bounds = Bounds(
        max_batch=2,
        max_seq_len=600,
        max_tokens=64,
        page_size=page_size,
        num_pages=100,
        vocab_size=10,
        dcp_size=W,
        interleave=I,
    )
    pages = PageAllocator(bounds, lookahead=0)
    first, second = [1] * 550, [1] * shared + [2] * (550 - shared)
    pages.open(0, pages.find(first))
    pages.grow(0, 550)
    pages.publish(0, first, 550)
    assert pages.find(second).length == found


def test_a_hit_matches_the_tokens_that_its_last_entry_depends_on() -> None:
    pages = PageAllocator(BOUNDS, lookahead=1)
    first = [1, 2, 3, 4, 5, 6]
    pages.open(0, pages.find(first))
    pages.grow(0, 6)
    pages.publish(0, first, 6)
    assert pages.find([1, 2, 3, 4, 5]).length == 4
    assert pages.find([1, 2, 3, 4, 9, 9]).length == 0


def test_pages_behind_the_window_return_once() -> None:
    pages = PageAllocator(BOUNDS, lookahead=None)
    pages.open(0, pages.find([1]))
    pages.grow(0, 20)
    held = pages.pages_of(0)
    for columns, free in ((0, 7), (2, 9), (2, 9), (3, 10)):
        pages.trim(0, columns)
        assert pages.free == free
        assert pages.pages_of(0) == (*[None] * columns, *held[columns:])
    pages.release(0)
    assert pages.free == 12


def test_pool_layout_and_bytes() -> None:
    layers = (AttentionLayer(4, 2, 8, scale=1.0), AttentionLayer(4, 1, 16, scale=1.0))
    pools = KVPools.allocate(layers, BOUNDS, torch.bfloat16, torch.device("cpu"))
    assert [tuple(p.shape) for p in pools.keys] == [(12, 2, 4, 8), (12, 1, 4, 16)]
    assert pools.num_bytes == 12 * page_bytes(layers, 4, torch.bfloat16)
    assert page_bytes(layers, 4, torch.bfloat16) == 4 * (2 * 2 * 8 + 2 * 16) * 2
