"""Which ranges were open in a thread at a time."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from graphattn.profiling.events import Range

Path = tuple[Range, ...]  # from the outermost range to the innermost


class _Thread:
    """Ranges of one thread, which nest: each has the one that was opened last around it."""

    def __init__(self, ranges: list[Range]) -> None:
        self.ranges = sorted(ranges, key=lambda x: (x.start, -x.end))
        self.starts = [x.start for x in self.ranges]
        self.parents: list[int] = []
        within: list[int] = []
        for index, inner in enumerate(self.ranges):
            while within and self.ranges[within[-1]].end < inner.end:
                within.pop()
            self.parents.append(within[-1] if within else -1)
            within.append(index)

    def at(self, time: int) -> Path:
        """Open at `time`; a range is not open at its end."""
        index = bisect_right(self.starts, time) - 1
        while index >= 0 and self.ranges[index].end <= time:
            index = self.parents[index]
        path = []
        while index >= 0:
            path.append(self.ranges[index])
            index = self.parents[index]
        return tuple(reversed(path))


@dataclass(frozen=True, slots=True)
class Nesting:
    """The ranges of all threads."""

    threads: dict[int | None, _Thread]

    @staticmethod
    def of(ranges: Iterable[Range]) -> Nesting:
        """Sorted by thread."""
        by_thread: dict[int | None, list[Range]] = defaultdict(list)
        for one in ranges:
            by_thread[one.thread].append(one)
        return Nesting({thread: _Thread(found) for thread, found in by_thread.items()})

    def at(self, time: int, thread: int | None) -> Path:
        """Ranges open in `thread` at `time`; where threads were not recorded, in the only one."""
        if (
            thread not in self.threads
            and len(self.threads) == 1
            and None in (thread, *self.threads)
        ):
            thread = next(iter(self.threads))
        found = self.threads.get(thread)
        return found.at(time) if found else ()
