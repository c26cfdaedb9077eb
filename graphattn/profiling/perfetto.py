"""The replays as a trace file for the viewer at ui.perfetto.dev: Chrome's JSON, which it opens.

A process has one track each for replays, stages, layers, nodes, idle time between replays, and the
host's ranges and calls; counters have their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from graphattn.profiling.events import Profile
from graphattn.profiling.gaps import Gap
from graphattn.profiling.places import Place
from graphattn.profiling.replays import Replay

TRACKS = ("replays", "idle", "stages", "layers", "nodes", "host ranges", "host calls")
Run = tuple[str, int, int]  # name, start, end


def trace_json(profile: Profile, replays: Sequence[Replay], gaps: Sequence[Gap]) -> str:
    """One JSON object with `traceEvents`, times in microseconds from the first event shown."""
    origin = min(replay.launch.start if replay.launch else replay.start for replay in replays)
    end = max(replay.end for replay in replays)
    events = [
        *_names(sorted({replay.process for replay in replays})),
        *(event for replay in replays for event in _replay(replay)),
        *(_slice("idle", "idle", gap.start, gap.end, gap.process) for gap in gaps if gap.idle),
        *_host(profile, origin, end),
        *_counters(profile, origin, end, replays[0].process),
    ]
    for event in events:
        if "ts" in event:
            event["ts"] = (event["ts"] - origin) / 1e3
    return json.dumps({"displayTimeUnit": "ns", "traceEvents": events})


def _names(processes: Sequence[int]) -> Iterator[dict[str, Any]]:
    for process in processes:
        name = {"name": f"graphattn, process {process}"}
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": name}
        for number, track in enumerate(TRACKS):
            shared = {"ph": "M", "pid": process, "tid": number}
            yield shared | {"name": "thread_name", "args": {"name": track}}
            yield shared | {"name": "thread_sort_index", "args": {"sort_index": number}}


def _replay(replay: Replay) -> Iterator[dict[str, Any]]:
    process, runs = replay.process, replay.nodes
    yield _slice("replays", replay.bucket, replay.start, replay.end, process)
    stages = [(place.stage if place else "unattributed", a.start, a.end) for a, place in runs]
    layers = [(_layer(place), a.start, a.end) for a, place in runs]
    for track, spans in (("stages", stages), ("layers", layers)):
        for name, start, end in _joined(spans):
            yield _slice(track, name, start, end, process)
    for activity, place in runs:
        where = {"bucket": replay.bucket, "stage": place.stage if place else "unattributed"}
        if place and place.layer is not None:
            where |= {"layer": str(place.layer)}
        if place and place.part:
            where |= {"part": place.part}
        event = _slice("nodes", activity.name, activity.start, activity.end, process)
        yield event | {"args": where}


def _layer(place: Place | None) -> str:
    return "" if place is None or place.layer is None else f"{place.stage} layer {place.layer}"


def _joined(runs: Sequence[Run]) -> Iterator[Run]:
    """Neighbours of one name as one; those without a name are left out."""
    current: Run | None = None
    for name, start, end in runs:
        if current is not None and current[0] == name:
            current = (name, current[1], max(current[2], end))
            continue
        if current is not None and current[0]:
            yield current
        current = (name, start, end)
    if current is not None and current[0]:
        yield current


def _host(profile: Profile, origin: int, end: int) -> Iterator[dict[str, Any]]:
    processes = {call.thread: call.process for call in profile.calls}
    for one in profile.ranges:
        if origin <= one.start <= end and one.thread in processes:
            yield _slice("host ranges", one.name, one.start, one.end, processes[one.thread])
    for call in profile.calls:
        if origin <= call.start <= end:
            yield _slice("host calls", call.name, call.start, call.end, call.process)


def _counters(profile: Profile, origin: int, end: int, process: int) -> Iterator[dict[str, Any]]:
    for count in profile.counts:
        if origin <= count.time <= end:
            shared = {"ph": "C", "pid": process, "tid": 0, "name": count.name}
            yield shared | {"ts": count.time, "args": {"value": count.value}}


def _slice(track: str, name: str, start: int, end: int, process: int) -> dict[str, Any]:
    times = {"ts": start, "dur": (end - start) / 1e3}
    return {"ph": "X", "name": name, "pid": process, "tid": TRACKS.index(track)} | times
