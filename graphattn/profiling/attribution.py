"""From a node that a replay ran to the ranges that were open when it was captured.

A captured node, and each clone of it that an instantiation makes, has a creation event; a clone
names its original. The event of the original lies in the thread and at the time of the capture.
Some recorders note the creations only when a capture ends, and torch.profiler notes none: then the
n-th node that a replay runs is the n-th launch of the capture, since a captured step is a straight
line. That is believed only if number and kinds are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from graphattn.profiling.events import Activity, Call, Creation, Kind, Profile
from graphattn.profiling.nesting import Nesting
from graphattn.profiling.places import Place, place_of

Node = tuple[int, int]  # process, number
Placed = tuple[tuple[Activity, Place | None], ...]
KINDS = {
    "cudaLaunchKernel": Kind.KERNEL,
    "cudaLaunchCooperativeKernel": Kind.KERNEL,
    "cuLaunchKernel": Kind.KERNEL,
    "cuLaunchCooperativeKernel": Kind.KERNEL,
    "cudaMemcpy": Kind.COPY,
    "cuMemcpy": Kind.COPY,
    "cudaMemset": Kind.SET,
    "cuMemset": Kind.SET,
}


@dataclass(frozen=True, slots=True)
class _Capture:
    """Launches of one capture, in order."""

    process: int
    bucket: str
    kinds: tuple[Kind, ...]
    places: tuple[Place | None, ...]


@dataclass(frozen=True, slots=True)
class Attribution:
    """What is known of the nodes of all graphs."""

    created: dict[Node, Place]
    originals: dict[Node, int]
    captures: tuple[_Capture, ...]

    @staticmethod
    def of(profile: Profile, nesting: Nesting) -> Attribution:
        """From the creation events, and from the launches inside captures."""
        created: dict[Node, Place] = {}
        originals: dict[Node, int] = {}
        for creation in sorted(profile.creations, key=lambda x: x.time):  # later ones are updates
            node = (creation.process, creation.node)
            if creation.original is not None:
                originals.setdefault(node, creation.original)
            elif place := _place(creation, nesting):
                created.setdefault(node, place)
        return Attribution(created, originals, tuple(_captures(profile, nesting)))

    def places(self, activities: Sequence[Activity], bucket: str | None) -> Placed:
        """The place of each activity of one replay, which are in the order of their start."""
        places = [self._by_creation(activity) for activity in activities]
        if not any(place and place.has_stage for place in places):
            places = self._by_order(activities, bucket) or places
        return tuple(zip(activities, places, strict=True))

    def _by_creation(self, activity: Activity) -> Place | None:
        """Of the original at the end of the chain of clones, or of the last one that is known."""
        if activity.node is None:
            return None
        process, node, seen = activity.process, activity.node, []
        while node not in seen:
            seen.append(node)
            node = self.originals.get((process, node), node)
        places = (self.created.get((process, each)) for each in reversed(seen))
        return next((place for place in places if place), None)

    def _by_order(
        self, activities: Sequence[Activity], bucket: str | None
    ) -> list[Place | None] | None:
        """Where exactly one kind of capture fits: of that bucket, with the same kinds of nodes."""
        kinds = tuple(activity.kind for activity in activities)
        fitting = {
            capture.places
            for capture in self.captures
            if capture.process == activities[0].process
            and capture.kinds == kinds
            and bucket in (None, capture.bucket)
        }
        return list(fitting.pop()) if len(fitting) == 1 else None


def _place(creation: Creation, nesting: Nesting) -> Place | None:
    return place_of([x.name for x in nesting.at(creation.time, creation.thread)])


def _captures(profile: Profile, nesting: Nesting) -> list[_Capture]:
    ran = {(x.process, x.correlation) for x in profile.activities}
    inside: dict[tuple[int, int, str], list[tuple[Kind, Place | None]]] = defaultdict(list)
    last_end: dict[int | None, int] = {}
    for call in sorted(profile.calls, key=lambda x: x.start):
        kind = _kind(call)
        if kind is None or (call.process, call.correlation) in ran:
            continue
        ranges = nesting.at(call.start, call.thread)
        capture = next((x for x in ranges if x.name.startswith("capture.")), None)
        # a driver call inside a runtime call is the same launch
        if capture is None or call.start < last_end.get(call.thread, call.start):
            continue
        last_end[call.thread] = call.end
        key = (call.process, capture.start, capture.name.removeprefix("capture."))
        inside[key].append((kind, place_of([x.name for x in ranges])))
    return [
        _Capture(process, bucket, tuple(k for k, _ in found), tuple(p for _, p in found))
        for (process, _, bucket), found in inside.items()
    ]


def _kind(call: Call) -> Kind | None:
    return next((kind for name, kind in KINDS.items() if call.name.startswith(name)), None)
