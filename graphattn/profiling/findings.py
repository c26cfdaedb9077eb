"""What slows a loop of replays down, in words.

The loop of a process is from its first launch of a graph to the end of its last replay.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from graphattn.profiling.events import Activity, Call, Kind, Profile, Way
from graphattn.profiling.gaps import Gap
from graphattn.profiling.nesting import Nesting
from graphattn.profiling.replays import Replay
from graphattn.profiling.units import time_text
from graphattn.tables import size_text

NOTABLE = 20_000  # ns of idle time: what a launch and the step's own copies take is below it
GAP_SHARE = 0.02  # of the loop
SYNCHRONISING = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cuEventSynchronize",
)
ALLOCATING = ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cuMemAlloc", "cuMemFree")
ASYNC = ("cudaMallocAsync", "cudaFreeAsync", "cuMemAllocAsync", "cuMemFreeAsync")


@dataclass(frozen=True, slots=True)
class Finding:
    """`kind` names what was found, `text` says it; `ns` is the time it took, 0 if none is known."""

    kind: str
    text: str
    count: int
    ns: int


@dataclass(frozen=True, slots=True)
class Loop:
    """The loops of all processes, by process, and the time in which each ran."""

    spans: dict[int, tuple[int, int]]
    origin: int

    @staticmethod
    def of(replays: Sequence[Replay]) -> Loop:
        """Of replays in the order of their start."""
        spans: dict[int, tuple[int, int]] = {}
        for replay in replays:
            first = replay.launch.start if replay.launch else replay.start
            start, end = spans.get(replay.process, (first, replay.end))
            spans[replay.process] = (min(start, first), max(end, replay.end))
        return Loop(spans, min(start for start, _ in spans.values()))

    @property
    def length(self) -> int:
        """Nanoseconds, added up over the processes."""
        return sum(end - start for start, end in self.spans.values())

    def holds(self, event: Call | Activity) -> bool:
        """Whether the event began in the loop of its process."""
        start, end = self.spans.get(event.process, (0, -1))
        return start <= event.start <= end

    def moment(self, time: int) -> str:
        """A time, counted from the beginning of the first loop."""
        return f"at +{time_text(time - self.origin)}"


def find(
    profile: Profile, nesting: Nesting, replays: Sequence[Replay], gaps: Sequence[Gap]
) -> list[Finding]:
    """All findings, those that cost most time first."""
    loop = Loop.of(replays)
    calls = [call for call in profile.calls if loop.holds(call)]
    replayed = {id(activity) for replay in replays for activity, _ in replay.nodes}
    work = [x for x in profile.activities if loop.holds(x) and id(x) not in replayed]
    by_launch = {(call.process, call.correlation): call for call in profile.calls}
    found = [
        _host_gaps(loop, gaps),
        *_waits(loop, nesting, calls),
        *_copies_out(loop, nesting, work, by_launch),
        _captured_copies(replays),
        _pageable(loop, work),
        _eager(loop, work),
        _allocations(loop, calls),
    ]
    return sorted((x for x in found if x is not None), key=lambda x: -x.ns)


def _host_gaps(loop: Loop, gaps: Sequence[Gap]) -> Finding | None:
    notable = [x for x in gaps if x.idle > NOTABLE and (x.late is None or x.late > NOTABLE)]
    idle = sum(x.idle for x in notable)
    if not notable or idle <= GAP_SHARE * loop.length:
        return None
    worst = max(notable, key=lambda x: x.idle)
    text = (
        f"the GPU was idle between replays for {time_text(idle)}, {idle / loop.length:.1%} of the "
        f"loop, in {len(notable)} of {len(gaps)} gaps. The longest, {time_text(worst.idle)} "
        f"{loop.moment(worst.start)}, lies between replays {worst.after} ({worst.before_bucket}) "
        f"and {worst.after + 1} ({worst.next_bucket})"
    )
    if worst.late is None:
        text += "; what the host did was not recorded"
    else:
        spent = ", ".join(f"{time_text(ns)} {name}" for name, ns in worst.host.items())
        text += (
            f": the host launched {time_text(worst.late)} after the GPU had ended, having spent "
            f"{spent}"
        )
    return Finding("host gap", f"{text}.", len(notable), idle)


def _waits(loop: Loop, nesting: Nesting, calls: Iterable[Call]) -> list[Finding]:
    """Calls that wait for the device, but for the engine's own wait for a step's results."""
    by_name: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        blocks = call.name in SYNCHRONISING or call.name == "cudaMemcpy"
        if blocks and not _inside(nesting, call, "wait"):
            by_name[call.name].append(call)
    found = []
    for name, waits in by_name.items():
        longest, total = max(waits, key=lambda x: x.duration), sum(x.duration for x in waits)
        where = f"{loop.moment(longest.start)}{_under(nesting, longest)}"
        text = (
            f"{name} was called {_times(waits)} in the loop and took {time_text(total)}, at most "
            f"{time_text(longest.duration)} {where}: "
            "the host stops until the device has caught up, and launches nothing meanwhile."
        )
        found.append(Finding("synchronising call", text, len(waits), total))
    return found


def _copies_out(
    loop: Loop,
    nesting: Nesting,
    work: Iterable[Activity],
    by_launch: dict[tuple[int, int | None], Call],
) -> list[Finding]:
    """Copies to the host, but for the output block of each step."""
    others: list[tuple[Activity, Call | None]] = []
    for copy in work:
        call = by_launch.get((copy.process, copy.correlation))
        if copy.way is Way.TO_HOST and not (call and _inside(nesting, call, "copy_out")):
            others.append((copy, call))
    if not others:
        return []
    first, call = others[0]
    total = sum(copy.duration for copy, _ in others)
    size = sum(copy.num_bytes for copy, _ in others)
    where = loop.moment(first.start)
    if call:
        where += f"{_under(nesting, call)} by {call.name}"
    text = (
        f"{_times(others)} in the loop something was copied from device to host, {size_text(size)} "
        f"in all, beside the output block of each step; first {where}: a value was read on the "
        "host, as .item(), .tolist(), .cpu() and conditions on tensors do. graphattn audit names "
        "the line."
    )
    return [Finding("device-to-host copy", text, len(others), total)]


def _captured_copies(replays: Iterable[Replay]) -> Finding | None:
    copies = [
        (activity, place)
        for replay in replays
        for activity, place in replay.nodes
        if activity.way in (Way.TO_HOST, Way.TO_DEVICE)
    ]
    if not copies:
        return None
    places = sorted({place.stage if place else "unattributed" for _, place in copies})
    total = sum(activity.duration for activity, _ in copies)
    text = (
        f"graphs hold copies between host and device, which ran {_times(copies)} "
        f"({', '.join(places)}): they read or write host memory when they run, where the host may "
        "have written the next step already."
    )
    return Finding("captured copy", text, len(copies), total)


def _pageable(loop: Loop, work: Iterable[Activity]) -> Finding | None:
    copies = [x for x in work if x.pageable]
    if not copies:
        return None
    total = sum(x.duration for x in copies)
    text = (
        f"{_times(copies)} in the loop pageable host memory was copied, first "
        f"{loop.moment(copies[0].start)}: such a copy is staged by the driver and holds the host "
        "up. Copy from and to pinned memory."
    )
    return Finding("pageable copy", text, len(copies), total)


def _eager(loop: Loop, work: Iterable[Activity]) -> Finding | None:
    kernels = [x for x in work if x.kind is Kind.KERNEL]
    if not kernels:
        return None
    names = _counted(x.name for x in kernels)
    total = sum(x.duration for x in kernels)
    text = (
        f"{len(kernels)} kernels were launched by themselves in the loop, {time_text(total)} in "
        f"all, first {loop.moment(kernels[0].start)}: {names}. What belongs to every step can be "
        "captured."
    )
    return Finding("kernel outside graphs", text, len(kernels), total)


def _allocations(loop: Loop, calls: Iterable[Call]) -> Finding | None:
    found = [x for x in calls if x.name.startswith(ALLOCATING) and not x.name.startswith(ASYNC)]
    if not found:
        return None
    names = _counted(x.name for x in found)
    total = sum(x.duration for x in found)
    text = (
        f"memory was allocated or freed {_times(found)} in the loop, {time_text(total)} in all, "
        f"first {loop.moment(found[0].start)}: {names}. Such calls can wait for the device; "
        "allocate before."
    )
    return Finding("allocation", text, len(found), total)


def _inside(nesting: Nesting, call: Call, name: str) -> bool:
    return any(x.name == name for x in nesting.at(call.start, call.thread))


def _under(nesting: Nesting, call: Call) -> str:
    names = [x.name for x in nesting.at(call.start, call.thread)]
    return f" inside {'/'.join(names)}" if names else ""


def _counted(names: Iterable[str]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in Counter(names).most_common(3))


def _times(things: Sequence[object]) -> str:
    return "once" if len(things) == 1 else f"{len(things)} times"
