"""What a program did in one run, and what of it a graph of that run would freeze."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from torch import Tensor

from .arguments import leaves
from .rules import OTHER_MEMORY, OTHER_PATH, OTHER_SHAPE, OTHER_VALUE, Rule
from .source import Place, user_place
from .storages import Storages, has_storage


@dataclass(frozen=True, slots=True)
class Memory:
    """A tensor among the arguments of an operation; `storage` is None if the program made it."""

    storage: int | None
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One operation, its line, and its arguments in order: numbers, and `Memory` of tensors."""

    operation: str
    place: Place
    arguments: tuple[Any, ...]


class Tracer:
    """Notes the operations of one run; `storages` numbers memory over several runs."""

    def __init__(self, storages: Storages) -> None:
        self.calls: list[Call] = []
        self._storages = storages
        self._born: set[int] = set()

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
        """Note a call that is about to run; the numbers of the memory that it is given."""
        arguments = tuple(self._noted(leaf) for leaf in leaves((args, kwargs)))
        self.calls.append(Call(str(func), user_place(), arguments))
        return {self._number(t) for t in leaves((args, kwargs)) if _is_memory(t)}

    def after(self, given: set[int], output: Any) -> None:
        """Note which memory the call made."""
        made = {self._number(leaf) for leaf in leaves(output) if _is_memory(leaf)}
        self._born |= made - given

    def _number(self, tensor: Tensor) -> int:
        return self._storages.number(tensor.untyped_storage())

    def _noted(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        number = self._number(leaf) if has_storage(leaf) else None
        return Memory(None if number in self._born else number, tuple(leaf.shape))


def _is_memory(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and has_storage(leaf)


def differences(first: list[Call], second: list[Call]) -> Iterator[tuple[str, Rule, Place]]:
    """What was not the same in the second run, where it comes from: operation, rule, place.

    What only follows from an earlier difference is left out: numbers and shapes of an operation
    that was given an intermediate of another shape.
    """
    found = False
    for a, b in zip_longest(first, second):
        if a is None or b is None or (a.operation, a.place) != (b.operation, b.place):
            at = b or a
            yield at.operation, OTHER_PATH, at.place
            return
        pairs = list(zip_longest(a.arguments, b.arguments))
        if any(_has_other_shape(x, y) and (found or x.storage is None) for x, y in pairs):
            continue
        rule = next((rule for x, y in pairs if (rule := _difference(x, y)) is not None), None)
        if rule is not None:
            found = True
            yield a.operation, rule, a.place


def _has_other_shape(x: Any, y: Any) -> bool:
    """Of the same memory, or of an intermediate."""
    both = isinstance(x, Memory) and isinstance(y, Memory)
    return both and x.storage == y.storage and x.shape != y.shape


def _difference(x: Any, y: Any) -> Rule | None:
    if isinstance(x, Memory) and isinstance(y, Memory):
        if x.storage != y.storage:
            return OTHER_MEMORY
        return OTHER_SHAPE.saying(x.shape, y.shape) if x.shape != y.shape else None
    same = x is y or (type(x) is type(y) and (x == y or (x != x and y != y)))
    return None if same else OTHER_VALUE.saying(x, y)
