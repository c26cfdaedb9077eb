"""The replays of a profile: each launch of a graph, with what it ran and where that belongs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from graphattn.profiling.attribution import Attribution
from graphattn.profiling.events import Activity, Call, GraphRun, Level, Profile
from graphattn.profiling.nesting import Nesting
from graphattn.profiling.places import Place

Launch = tuple[int, int | None]  # process, correlation
LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")


@dataclass(frozen=True, slots=True)
class Replay:
    """One launch of a graph. With `level` GRAPH its nodes were not recorded."""

    process: int
    bucket: str
    level: Level
    start: int  # on the device
    end: int
    launch: Call | None
    nodes: tuple[tuple[Activity, Place | None], ...]

    @property
    def busy(self) -> int:
        """Nanoseconds that its nodes ran, added up; that it ran, if they were not recorded."""
        if self.level is Level.GRAPH:
            return self.end - self.start
        return sum(activity.duration for activity, _ in self.nodes)


def find_replays(profile: Profile, nesting: Nesting) -> list[Replay]:
    """In the order in which the device began them."""
    launches = {(c.process, c.correlation): c for c in profile.calls if is_graph_launch(c)}
    groups = _by_launch(profile.activities, launches)
    attribution = Attribution.of(profile, nesting)
    found = []
    for launch, activities in groups.items():
        call = launches.get(launch)
        named = _bucket(call, nesting)
        nodes = attribution.places(activities, named)
        bucket = named or next((p.bucket for _, p in nodes if p and p.bucket), None)
        start, end = activities[0].start, max(x.end for x in activities)
        found.append(Replay(launch[0], bucket or "unnamed", Level.NODE, start, end, call, nodes))
    for run in profile.runs:
        key = (run.process, run.correlation)
        if key not in groups:
            call = launches.get(key)
            bucket = _bucket(call, nesting) or f"graph {run.graph}"
            found.append(_whole(run, bucket, call))
    return sorted(found, key=lambda x: x.start)


def is_graph_launch(call: Call) -> bool:
    """Whether the call launches a graph."""
    return call.name.startswith(LAUNCHES)


def _whole(run: GraphRun, bucket: str, call: Call | None) -> Replay:
    return Replay(run.process, bucket, Level.GRAPH, run.start, run.end, call, ())


def _by_launch(
    activities: Iterable[Activity], launches: dict[Launch, Call]
) -> dict[Launch, list[Activity]]:
    """Activities of graphs by their launch, in the order of their start."""
    groups: dict[Launch, list[Activity]] = defaultdict(list)
    for activity in sorted(activities, key=lambda x: (x.start, x.end)):
        launch = (activity.process, activity.correlation)
        if activity.node is not None or launch in launches:
            groups[launch].append(activity)
    return groups


def _bucket(call: Call | None, nesting: Nesting) -> str | None:
    """Of the range `replay.BUCKET` around the launch."""
    ranges = nesting.at(call.start, call.thread) if call else ()
    names = [x.name for x in ranges if x.name.startswith("replay.")]
    return names[-1].removeprefix("replay.") if names else None
