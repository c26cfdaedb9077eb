"""KV pages: the pools on the device, and the allocator on the host.

The allocator works only with upper bounds: it never needs a device value. The same page ids
serve every rank of a DCP group, since rank 0's shard is the longest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphattn.bounds import Bounds, prefix_unit, tokens_in_shard
from graphattn.inputs import PageUpdate
from graphattn.models.contract import AttentionLayer
from graphattn.prefix import PrefixCache, Unit


def page_bytes(layers: Sequence[AttentionLayer], page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers."""
    return sum(layer.entry_values for layer in layers) * page_size * dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVPools:
    """K and V of every layer, each [num_pages, num_kv_heads, page_size, head_dim].

    The keys of a latent layer are its latents (num_kv_heads = 1); they hold its values too.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor | None, ...]  # None of a latent layer

    @staticmethod
    def allocate(
        layers: Sequence[AttentionLayer], bounds: Bounds, dtype: torch.dtype, device: torch.device
    ) -> KVPools:
        """Zeroed pools; on a CPU the memory is committed only as it is written."""

        def pool(layer: AttentionLayer) -> Tensor:
            shape = (bounds.num_pages, layer.num_kv_heads, bounds.page_size, layer.head_dim)
            return torch.zeros(shape, dtype=dtype, device=device)

        return KVPools(
            keys=tuple(pool(layer) for layer in layers),
            values=tuple(None if layer.value_dim else pool(layer) for layer in layers),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Every pool by name."""
        named = {f"keys.{i}": pool for i, pool in enumerate(self.keys)}
        values = {f"values.{i}": pool for i, pool in enumerate(self.values) if pool is not None}
        return named | values

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.numel() * pool.itemsize for pool in self.tensors().values())


@dataclass(frozen=True, slots=True)
class Prefix:
    """What is known of the beginning of a sequence."""

    units: tuple[Unit, ...]
    length: int  # tokens

    @property
    def pages(self) -> tuple[int, ...]:
        """By column."""
        return tuple(page for unit in self.units for page in unit.pages)


@dataclass(slots=True)
class _Table:
    """Pages of one slot."""

    pages: list[int | None]  # by column; None: returned, its positions are out of every window
    parent: int  # number of the last unit that was published or found, -1 before the first
    published: int  # units
    publishes: bool  # whether further units are offered to others


class PageAllocator:
    """Pages of each slot: taken as the bound on its length grows, shared where prefixes are equal.

    A page is free, held by one or more slots, or cached: nobody holds it, but a later request may
    find the tokens whose KV it has. Cached pages are given away when no free one is left.
    Invariant: free + cached + taken == num_pages.
    """

    def __init__(self, bounds: Bounds, *, lookahead: int | None) -> None:
        """`lookahead`: tokens beyond an entry that its KV depends on; None shares nothing."""
        self._bounds = bounds
        unit = prefix_unit(bounds.page_size, bounds.dcp_size, bounds.interleave)
        self._unit_columns = bounds.pages_for(unit)
        self._shares = lookahead is not None
        self._prefixes = PrefixCache(unit, lookahead or 0)
        self._free = list(range(bounds.num_pages - 1, -1, -1))
        self._holders = [0] * bounds.num_pages
        self._taken = 0  # pages with a holder
        self._unit_of: dict[int, Unit] = {}  # by page
        self._tables: dict[int, _Table] = {}

    @property
    def free(self) -> int:
        """Pages without content."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Pages that nobody holds and that a prefix may be found in."""
        return self._bounds.num_pages - self.free - self.taken

    @property
    def taken(self) -> int:
        """Pages that slots hold."""
        return self._taken

    @property
    def available(self) -> int:
        """Pages that can be taken now."""
        return self.free + self._prefixes.idle * self._unit_columns

    def pages_of(self, slot: int) -> tuple[int | None, ...]:
        """Pages of a slot, by column; None for those that were returned."""
        return tuple(self._tables[slot].pages) if slot in self._tables else ()

    def find(self, tokens: Sequence[int]) -> Prefix:
        """The longest prefix of `tokens`, not all of them, whose KV is there."""
        units = self._prefixes.find(tokens) if self._shares else ()
        return Prefix(units, len(units) * self._prefixes.unit)

    def price(self, prefix: Prefix, num_tokens: int) -> int:
        """By how much `available` falls when a slot opens with `prefix` and grows to
        `num_tokens`."""
        revived = sum(not self._holders[page] for page in prefix.pages)
        return self._bounds.pages_for(num_tokens) - len(prefix.pages) + revived

    def open(self, slot: int, prefix: Prefix) -> list[PageUpdate]:
        """Seat a request in `slot` whose first tokens are `prefix`; the page-table updates."""
        assert slot not in self._tables, f"slot {slot} is taken"
        for unit in prefix.units:
            self._prefixes.wake(unit)
        for page in prefix.pages:
            self._hold(page)
        parent = prefix.units[-1].number if prefix.units else -1
        self._tables[slot] = _Table(list(prefix.pages), parent, len(prefix.units), self._shares)
        return [PageUpdate(slot, column, page) for column, page in enumerate(prefix.pages)]

    def room(self, slot: int) -> int:
        """Tokens that the pages of `slot` hold."""
        b = self._bounds
        entries = len(self._tables[slot].pages) * b.page_size
        return tokens_in_shard(entries, b.dcp_size, b.interleave)

    def missing(self, slot: int, num_tokens: int) -> int:
        """Pages that `slot` must take to hold `num_tokens` tokens."""
        return max(0, self._bounds.pages_for(num_tokens) - len(self._tables[slot].pages))

    def grow(self, slot: int, num_tokens: int) -> list[PageUpdate]:
        """Take pages until `slot` can hold `num_tokens`; `missing` of them must be available."""
        if not (count := self.missing(slot, num_tokens)):
            return []
        pages, taken = self._tables[slot].pages, [self._take() for _ in range(count)]
        first = len(pages)
        pages += taken
        return [PageUpdate(slot, first + i, page) for i, page in enumerate(taken)]

    def yields(self, slot: int) -> int:
        """Pages that become available when `slot` is released."""
        return sum(p is not None and self._holders[p] == 1 for p in self._tables[slot].pages)

    def release(self, slot: int) -> None:
        """Return the pages of `slot`.

        They may be given to another slot in the next step at once: all steps run in one stream,
        and that step releases `slot` before it writes anything. Beginnings of prefixes are the
        last to be given away.
        """
        for page in reversed(self._tables.pop(slot).pages):
            if page is not None:
                self._let_go(page)

    def trim(self, slot: int, columns: int) -> None:
        """Return the first `columns` pages of `slot`, in whole units: no step in flight or to come
        reads them."""
        table = self._tables[slot]
        whole = min(columns, len(table.pages)) // self._unit_columns * self._unit_columns
        for column in range(whole - 1, -1, -1):
            if (page := table.pages[column]) is None:
                return
            table.pages[column] = None
            self._let_go(page)

    def completes(self, slot: int, length: int, known: int) -> bool:
        """Whether `publish` has something to offer: the KV of the first `length` tokens is written
        by launched steps, `known` tokens are known."""
        table = self._tables[slot]
        return table.publishes and self._prefixes.covers(table.published, length, known)

    def unit_end(self, slot: int) -> float:
        """Tokens of `slot` at which its next unit is complete; infinite when it shares none."""
        table = self._tables[slot]
        return (table.published + 1) * self._prefixes.unit if table.publishes else math.inf

    def publish(self, slot: int, tokens: Sequence[int], length: int) -> None:
        """Let later requests find the whole units of the first `length` of `tokens`."""
        table, columns = self._tables[slot], self._unit_columns
        while table.publishes and self._prefixes.covers(table.published, length, len(tokens)):
            first = table.published * columns
            pages = [p for p in table.pages[first : first + columns] if p is not None]
            if not pages:  # out of every window before it was complete
                table.publishes = False
                return
            unit, new = self._prefixes.add(table.parent, table.published, tokens, pages)
            if new:
                self._unit_of |= dict.fromkeys(pages, unit)
            table.parent, table.published = unit.number, table.published + 1

    def retract(self, slot: int) -> None:
        """What `slot` holds must not be found: its KV is poisoned."""
        held = self._tables[slot].pages
        for unit in {self._unit_of[p] for p in held if p is not None and p in self._unit_of}:
            self._unlist(unit)
        self._tables[slot].publishes = False

    def forget(self) -> None:
        """Nothing written so far is to be found: the weights, or the pools, were changed."""
        for unit in self._prefixes.units:
            self._unlist(unit)
        for table in self._tables.values():
            table.publishes = False

    def _take(self) -> int:
        if not self._free:
            self._unlist(self._prefixes.oldest())
        page = self._free.pop()
        self._hold(page)
        return page

    def _hold(self, page: int) -> None:
        self._taken += not self._holders[page]
        self._holders[page] += 1

    def _let_go(self, page: int) -> None:
        self._holders[page] -= 1
        if self._holders[page]:
            return
        self._taken -= 1
        if (unit := self._unit_of.get(page)) is None:
            self._free.append(page)
        elif not any(self._holders[p] for p in unit.pages):
            self._prefixes.rest(unit)

    def _unlist(self, unit: Unit) -> None:
        """Its pages are like any others."""
        self._prefixes.drop(unit)
        for page in unit.pages:
            del self._unit_of[page]
            if not self._holders[page]:
                self._free.append(page)
