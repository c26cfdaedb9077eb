"""Prefixes whose KV is in the pages already: which units of tokens, and in which pages.

Prefixes are shared in whole units (`bounds.prefix_unit`): the smallest number of tokens that fills
whole pages on every DCP rank, so that a shared page is never written again. A unit is found by its
tokens and the unit before it. Where a drafter's entry depends on the token after it, that token
belongs to the unit too: a hit then matches one token beyond its end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """The KV of one unit of tokens; compared by identity."""

    number: int  # never used again
    parent: int  # number of the unit before it; -1 of the first
    tokens: tuple[int, ...]
    pages: tuple[int, ...]  # by column


class PrefixCache:
    """Every unit that can be found, and those that nobody holds, least recently held first."""

    def __init__(self, unit: int, lookahead: int) -> None:
        self.unit = unit  # tokens
        self._lookahead = lookahead  # tokens beyond a unit that its entries depend on
        self._units: dict[tuple[int, tuple[int, ...]], Unit] = {}
        self._idle: OrderedDict[Unit, None] = OrderedDict()
        self._next = 0

    def find(self, tokens: Sequence[int]) -> tuple[Unit, ...]:
        """The longest known prefix of `tokens`, unit by unit; at least one token is left over,
        since the last token's logits are wanted."""
        found: list[Unit] = []
        while (len(found) + 1) * self.unit < len(tokens):
            parent = found[-1].number if found else -1
            unit = self._units.get((parent, self._key(tokens, len(found))))
            if unit is None:
                break
            found.append(unit)
        return tuple(found)

    def covers(self, index: int, length: int, known: int) -> bool:
        """Whether unit `index` of a sequence is complete: the KV of its first `length` tokens is
        written and `known` tokens are known."""
        end = (index + 1) * self.unit
        return end <= length and end + self._lookahead <= known

    def add(
        self, parent: int, index: int, tokens: Sequence[int], pages: Sequence[int]
    ) -> tuple[Unit, bool]:
        """Unit `index` of `tokens` lies in `pages`; returns the unit that is known from now on,
        which is another one, in other pages, when two requests computed the same, and whether it
        is new."""
        key = (parent, self._key(tokens, index))
        if (known := self._units.get(key)) is not None:
            return known, False
        unit = Unit(self._next, parent, key[1], tuple(pages))
        self._next += 1
        self._units[key] = unit
        return unit, True

    def rest(self, unit: Unit) -> None:
        """Nobody holds its pages any more."""
        self._idle[unit] = None

    def wake(self, unit: Unit) -> None:
        """Somebody holds its pages again."""
        self._idle.pop(unit, None)

    def oldest(self) -> Unit:
        """Of the units that nobody holds."""
        return next(iter(self._idle))

    def drop(self, unit: Unit) -> None:
        """It is not to be found any more."""
        self._idle.pop(unit, None)
        del self._units[unit.parent, unit.tokens]

    @property
    def units(self) -> tuple[Unit, ...]:
        """All that can be found."""
        return tuple(self._units.values())

    @property
    def idle(self) -> int:
        """How many nobody holds."""
        return len(self._idle)

    def _key(self, tokens: Sequence[int], index: int) -> tuple[int, ...]:
        start = index * self.unit
        return tuple(tokens[start : start + self.unit + self._lookahead])
