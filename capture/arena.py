"""One block of memory that the intermediates of a family of programs share."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import UntypedStorage

ALIGNMENT = 64  # bytes: what torch's CPU allocator gives, and so what its kernels were run with


@dataclass(frozen=True, slots=True)
class Lifetime:
    """First and last operation that touches an intermediate (both inclusive) and its size."""

    first: int
    last: int
    nbytes: int


def plan(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Offsets such that no two intermediates that are alive together overlap, and the total.

    Walks the program as an allocator would: best fit among the gaps, neighbours joined.
    """
    births = sorted(range(len(lifetimes)), key=lambda i: (lifetimes[i].first, -lifetimes[i].nbytes))
    alive: list[tuple[int, int]] = []  # (last, index), by last
    heap = _Heap()
    offsets = [0] * len(lifetimes)
    for i in births:
        while alive and alive[0][0] < lifetimes[i].first:
            _, dead = alive.pop(0)
            heap.free(offsets[dead], _aligned(lifetimes[dead].nbytes))
        offsets[i] = heap.allocate(_aligned(lifetimes[i].nbytes))
        insort(alive, (lifetimes[i].last, i))
    return offsets, heap.high


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class _Heap:
    """Gaps of an address range that grows at its end."""

    def __init__(self) -> None:
        self._gaps: dict[int, int] = {}  # offset -> size
        self.high = 0

    def allocate(self, size: int) -> int:
        fitting = [(gap, offset) for offset, gap in self._gaps.items() if gap >= size]
        if fitting:
            gap, offset = min(fitting)
            del self._gaps[offset]
            if gap > size:
                self._gaps[offset + size] = gap - size
            return offset
        for offset, gap in self._gaps.items():
            if offset + gap == self.high:  # grow the last gap instead of leaving it behind
                del self._gaps[offset]
                self.high = offset + size
                return offset
        offset, self.high = self.high, self.high + size
        return offset

    def free(self, offset: int, size: int) -> None:
        if size == 0:
            return
        for other, gap in list(self._gaps.items()):
            if other + gap == offset:
                del self._gaps[other]
                offset, size = other, gap + size
            elif offset + size == other:
                del self._gaps[other]
                size += gap
        self._gaps[offset] = size


class Arena:
    """A storage that grows while graphs are captured and stays where it is afterwards.

    Graphs bound to it see its growth: they hold the storage, not its address.
    """

    def __init__(self) -> None:
        self.storage = UntypedStorage(0)

    def reserve(self, nbytes: int) -> int:
        """Make room for `nbytes`; returns by how many bytes the arena has grown."""
        grown = max(0, nbytes - self.storage.nbytes())
        if grown:
            self.storage.resize_(nbytes)
        return grown


def poison(storage: UntypedStorage) -> None:
    """Fill memory so that whoever reads it notices.

    The pattern of the largest int32 is NaN in every floating type, in pairs of 16 bits too, and
    far out of range as an index of 32 or 64 bits.
    """
    words = storage.nbytes() // 4
    torch.empty(0, dtype=torch.int32).set_(storage, 0, (words,), (1,)).fill_(0x7FFFFFFF)
    tail = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
    tail[4 * words :].fill_(0x7F)
