"""The time between replays in which the device did nothing, and what the host did meanwhile."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from graphattn.profiling.events import Activity, Call, Profile, Range
from graphattn.profiling.replays import Replay

OUTSIDE = "outside CUDA calls"

Span = tuple[int, int, str]  # start, end, name


@dataclass(frozen=True, slots=True)
class Gap:
    """Between replay number `after` of its process and the next. Nanoseconds.

    `idle` is without what else the device did. `late` is how long after the end of the replay the
    host began to launch the next one: 0 when it was ahead, None when its calls are not known.
    `host` says how it spent that time.
    """

    process: int
    after: int
    before_bucket: str
    next_bucket: str
    start: int
    end: int
    idle: int
    late: int | None
    host: Mapping[str, int]


def find_gaps(profile: Profile, replays: Sequence[Replay]) -> list[Gap]:
    """One for each pair of replays that follow each other in a process."""
    by_process: dict[int, list[Replay]] = defaultdict(list)
    for replay in replays:
        by_process[replay.process].append(replay)
    replayed = {id(activity) for replay in replays for activity, _ in replay.nodes}
    spent = _HostTime(profile)
    gaps: list[Gap] = []
    for process, found in by_process.items():
        others = [x for x in profile.activities if x.process == process and id(x) not in replayed]
        gaps += _gaps(process, found, _Busy(others), spent)
    return gaps


def _gaps(process: int, replays: Sequence[Replay], busy: _Busy, spent: _HostTime) -> Iterator[Gap]:
    end = replays[0].end
    for index, (before, after) in enumerate(pairwise(replays)):
        end = max(end, before.end)
        launch = after.launch
        late = None if launch is None else max(0, launch.start - end)
        yield Gap(
            process=process,
            after=index,
            before_bucket=before.bucket,
            next_bucket=after.bucket,
            start=end,
            end=max(end, after.start),
            idle=max(0, after.start - end - busy.between(end, after.start)),
            late=late,
            host=spent.between(end, launch) if launch and late else {},
        )


class _Busy:
    """When the device ran something that belongs to no replay."""

    def __init__(self, activities: Sequence[Activity]) -> None:
        self._spans = _disjoint((x.start, x.end, x.name) for x in activities)
        self._starts = [start for start, _, _ in self._spans]

    def between(self, start: int, end: int) -> int:
        """Nanoseconds of [start, end)."""
        return sum(ns for _, ns in _cut(self._spans, self._starts, start, end))


class _HostTime:
    """What each thread spent its time in: the engine's `wait`, or a CUDA call outside one."""

    def __init__(self, profile: Profile) -> None:
        found: dict[int | None, list[Span]] = defaultdict(list)
        waits = [x for x in profile.ranges if x.name == "wait"]
        everything: list[Range | Call] = [*waits, *profile.calls]
        for one in everything:
            found[one.thread].append((one.start, one.end, one.name))
        self._spans = {thread: _disjoint(spans) for thread, spans in found.items()}
        self._starts = {t: [start for start, _, _ in s] for t, s in self._spans.items()}

    def between(self, start: int, launch: Call) -> dict[str, int]:
        """Nanoseconds from `start` to `launch` in its thread by name, the longest first."""
        spans, starts = self._spans[launch.thread], self._starts[launch.thread]
        spent: dict[str, int] = defaultdict(int)
        for name, ns in _cut(spans, starts, start, launch.start):
            spent[name] += ns
        spent[OUTSIDE] = launch.start - start - sum(spent.values())
        return {name: ns for name, ns in sorted(spent.items(), key=lambda x: -x[1]) if ns}


def _disjoint(spans: Iterable[Span]) -> list[Span]:
    """In order; of two that overlap, the one that began first keeps the time they share."""
    found: list[Span] = []
    for start, end, name in sorted(spans, key=lambda x: (x[0], -x[1])):
        start = max(start, found[-1][1]) if found else start
        if end > start:
            found.append((start, end, name))
    return found


def _cut(
    spans: Sequence[Span], starts: Sequence[int], start: int, end: int
) -> Iterator[tuple[str, int]]:
    """Names and lengths of what lies in [start, end)."""
    for index in range(max(0, bisect_right(starts, start) - 1), len(spans)):
        first, last, name = spans[index]
        if first >= end:
            return
        if min(last, end) > max(first, start):
            yield name, min(last, end) - max(first, start)
