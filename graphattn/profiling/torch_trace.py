"""Reads the Chrome trace that torch.profiler exports, plain or gzipped.

It knows no creations of graph nodes. What was launched while a graph was captured has a place in
our ranges; what a replay ran has its order.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphattn.errors import wrong
from graphattn.profiling.events import Activity, Call, Kind, Profile, Range, Way

RECORD = (
    "Record one with `with torch.profiler.profile() as p:` around the capture and some steps, then "
    "p.export_chrome_trace(FILE)"
)
CALLS = {"cuda_runtime", "cuda_driver"}
PREFIX = "graphattn/"  # of the names of our ranges
WORK = {"kernel": Kind.KERNEL, "gpu_memcpy": Kind.COPY, "gpu_memset": Kind.SET}
COPY = re.compile(r"Memcpy \w+ \((?P<source>\w+) -> (?P<target>\w+)\)")


def read_torch_trace(path: Path) -> Profile:
    """The profile in a Chrome trace; `ConfigError` when it is none, or nothing of CUDA is in it."""
    events = [event for event in _events(path) if event.get("ph") == "X"]
    threads = _threads(events)
    calls = [_call(x, threads) for x in events if x.get("cat") in CALLS]
    processes = {call.correlation: call.process for call in calls}
    activities = [_activity(x, processes) for x in events if x.get("cat") in WORK]
    if not activities:
        raise wrong("FILE", "a trace with CUDA work", f"{path} without any", RECORD)
    return Profile(
        source="torch.profiler",
        ranges=[_range(x, threads) for x in events if _is_range(x)],
        counts=[],
        calls=calls,
        activities=activities,
        runs=[],
        creations=[],
        notes=("torch.profiler records no counters",),
    )


def _events(path: Path) -> list[dict[str, Any]]:
    content = path.read_bytes()
    try:
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
        trace = json.loads(content)
    except (OSError, EOFError, ValueError) as error:
        raise wrong("FILE", "a JSON trace of torch.profiler", f"{path}: {error}", RECORD) from None
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        raise wrong("FILE", "a trace with traceEvents", f"{path} without", RECORD)
    return [event for event in events if isinstance(event, dict)]


Threads = Mapping[tuple[object, object], int]


def _threads(events: list[dict[str, Any]]) -> Threads:
    """Numbers for the threads of all processes."""
    named = dict.fromkeys((event.get("pid"), event.get("tid")) for event in events)
    return {thread: number for number, thread in enumerate(named)}


def _is_range(event: Mapping[str, Any]) -> bool:
    return event.get("cat") == "cpu_op" and str(event.get("name")).startswith(PREFIX)


def _times(event: Mapping[str, Any]) -> tuple[int, int]:
    """Start and end in nanoseconds; the trace has microseconds."""
    start = float(event["ts"])
    return round(1e3 * start), round(1e3 * (start + float(event.get("dur", 0))))


def _range(event: Mapping[str, Any], threads: Threads) -> Range:
    name = event["name"].removeprefix(PREFIX)
    return Range(name, *_times(event), threads[event.get("pid"), event.get("tid")])


def _call(event: Mapping[str, Any], threads: Threads) -> Call:
    thread, process = threads[event.get("pid"), event.get("tid")], event.get("pid")
    correlation = event.get("args", {}).get("correlation")
    return Call(event["name"], *_times(event), _number(process), thread, correlation or None)


def _activity(event: Mapping[str, Any], processes: Mapping[int | None, int]) -> Activity:
    """`processes` by correlation: a device event names the device in place of its process."""
    kind, arguments = WORK[event["cat"]], event.get("args", {})
    copy = COPY.search(event["name"])
    ends = (copy["source"], copy["target"]) if copy else ("", "")
    correlation = arguments.get("correlation") or None
    return Activity(
        kind=kind,
        name=event["name"],
        start=_times(event)[0],
        end=_times(event)[1],
        process=processes.get(correlation, 0),
        correlation=correlation,
        node=arguments.get("graph node id") or None,
        way=_way(*ends) if kind is Kind.COPY else None,
        num_bytes=int(arguments.get("bytes", 0)),
        pageable="Pageable" in ends,
    )


def _way(source: str, target: str) -> Way:
    if (source == "Device") == (target == "Device"):
        return Way.OTHER
    return Way.TO_HOST if source == "Device" else Way.TO_DEVICE


def _number(process: object) -> int:
    return process if isinstance(process, int) else 0
