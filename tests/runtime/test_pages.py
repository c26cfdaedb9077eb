"""The page allocator against a naive model, and what it costs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from graphattn.bounds import Bounds
from graphattn.models.contract import AttentionLayer
from graphattn.pages import KVPools, PageAllocator, page_bytes

BOUNDS = Bounds(
    max_batch=4, max_seq_len=40, max_tokens=16, page_size=4, num_pages=12, vocab_size=10
)


class AllocatorMachine(RuleBasedStateMachine):
    """Random admissions, growth and releases; the model is a set of pages per slot."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(BOUNDS)
        self.table: dict[int, dict[int, int]] = {}  # what a device page table would hold
        self.limit: dict[int, int] = {}

    @rule(slot=st.integers(0, 3), tokens=st.integers(1, 40))
    def admit(self, slot: int, tokens: int) -> None:
        if slot in self.limit:
            return
        spare = BOUNDS.num_pages - sum(BOUNDS.pages_for(n) for n in self.limit.values())
        assert self.pages.fits(tokens) == (BOUNDS.pages_for(tokens) <= spare)
        if self.pages.fits(tokens):
            self.pages.reserve(slot, tokens)
            self.limit[slot] = tokens
            self.table[slot] = {}

    @precondition(lambda self: self.limit)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.limit)))
        tokens = data.draw(st.integers(0, self.limit[slot]))
        before = dict(self.table[slot])
        for update in self.pages.grow(slot, tokens):
            assert update.slot == slot
            assert update.column not in before, "a column is set once"
            self.table[slot][update.column] = update.page
        assert len(self.table[slot]) == max(len(before), BOUNDS.pages_for(tokens))

    @precondition(lambda self: self.limit)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.limit)))
        self.pages.release(slot)
        del self.limit[slot], self.table[slot]

    @invariant()
    def every_page_has_one_owner(self) -> None:
        owned = [page for columns in self.table.values() for page in columns.values()]
        assert len(owned) == len(set(owned))
        assert all(0 <= page < BOUNDS.num_pages for page in owned)
        assert self.pages.taken == len(owned)
        assert self.pages.free == BOUNDS.num_pages - len(owned)
        for slot, columns in self.table.items():
            assert self.pages.pages_of(slot) == tuple(columns[i] for i in range(len(columns)))

    @invariant()
    def a_reservation_can_always_be_taken(self) -> None:
        assert 0 <= self.pages.promised <= self.pages.free


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_growth_beyond_the_reservation_is_our_own_bug() -> None:
    pages = PageAllocator(BOUNDS)
    pages.reserve(0, 4)
    with pytest.raises(AssertionError, match="outgrew"):
        pages.grow(0, 5)


def test_pool_layout_and_bytes() -> None:
    layers = (AttentionLayer(4, 2, 8, scale=1.0), AttentionLayer(4, 1, 16, scale=1.0))
    pools = KVPools.allocate(layers, BOUNDS, torch.bfloat16, torch.device("cpu"))
    assert [tuple(p.shape) for p in pools.keys] == [(12, 2, 4, 8), (12, 1, 4, 16)]
    assert pools.num_bytes == 12 * page_bytes(layers, 4, torch.bfloat16)
    assert page_bytes(layers, 4, torch.bfloat16) == 4 * (2 * 2 * 8 + 2 * 16) * 2
