"""Reads `nsys export --type sqlite`, with the graph trace at node or at graph level."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from graphattn.errors import wrong
from graphattn.profiling.events import (
    Activity,
    Call,
    Count,
    Creation,
    GraphRun,
    Kind,
    Profile,
    Range,
    Way,
)
from graphattn.profiling.tables import RECORD, Tables, open_tables

DOMAIN = "graphattn"
PUSH_POP, MARK, DOMAIN_CREATE = 59, 34, 75  # NVTX_EVENTS.eventType
WAYS = {1: Way.TO_DEVICE, 2: Way.TO_HOST}  # copyKind, where no table of the export says it
WORK = {
    Kind.KERNEL: "CUPTI_ACTIVITY_KIND_KERNEL",
    Kind.COPY: "CUPTI_ACTIVITY_KIND_MEMCPY",
    Kind.SET: "CUPTI_ACTIVITY_KIND_MEMSET",
}
CALLS, RUNS = "CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
CREATIONS = "CUDA_GRAPH_NODE_EVENTS"
MISSING = {
    WORK[Kind.KERNEL]: "no kernel was recorded by itself",
    CALLS: "no CUDA call of the host was recorded: launch times, waits and the cause of gaps are "
    "unknown",
    CREATIONS: "no creation of graph nodes was recorded: nodes are attributed by the order of the "
    "launches in the capture, if those were recorded",
}


def read_nsys(path: Path) -> Profile:
    """The profile in an sqlite export.

    Raises `ConfigError` when it is none, when it has no ranges of ours, or nothing of CUDA.
    """
    with open_tables(path) as tables:
        ranges, counts, notes = _ranges(tables, path)
        activities = [x for kind in WORK for x in _activities(tables, kind)]
        runs = list(_runs(tables))
        if not activities and not runs:
            raise wrong("FILE", "a profile with CUDA work", f"{path} without any", RECORD)
        return Profile(
            source=_source(tables),
            ranges=ranges,
            counts=counts,
            calls=list(_calls(tables)),
            activities=activities,
            runs=runs,
            creations=list(_creations(tables)),
            notes=(*notes, *(text for table, text in MISSING.items() if table not in tables)),
        )


def process_of(global_id: int | None) -> int:
    """The process in a globalTid or globalPid: its lower 24 bits are the thread."""
    return 0 if global_id is None else global_id >> 24


def _source(tables: Tables) -> str:
    export = dict(tables.rows("META_DATA_EXPORT", "name", "value"))
    version = export.get("EXPORT_SCHEMA_VERSION")
    return f"nsys, export schema {version}" if version else "nsys, export schema unknown"


def _ranges(tables: Tables, path: Path) -> tuple[list[Range], list[Count], list[str]]:
    """Of our domain; of every domain where the export does not tell them apart."""
    table, ours, notes = "NVTX_EVENTS", None, []
    if table not in tables:
        raise wrong("FILE", "NVTX ranges", f"{path} without a table {table}", RECORD)
    values = ("int64Value", "uint64Value", "int32Value", "uint32Value")
    columns = ("eventType", "start", "end", "text", "textId", "globalTid", "domainId", *values)
    events = list(tables.rows(table, *columns))
    if tables.has(table, "domainId") and tables.has(table, "eventType"):
        ours = {
            (process_of(thread), domain)
            for event, _, _, text, text_id, thread, domain, *_ in events
            if event == DOMAIN_CREATE and tables.text(text, text_id) == DOMAIN
        }
    else:
        notes.append("the export does not tell NVTX domains apart: ranges of others may mix in")
    ranges, counts = [], []
    for event, start, end, text, text_id, thread, domain, *payloads in events:
        if ours is not None and (process_of(thread), domain) not in ours:
            continue
        name = tables.text(text, text_id)
        value = next((x for x in payloads if x is not None), None)
        closed = end is not None and end >= start  # older exports have 0 or -1 for no end
        if event in (PUSH_POP, None) and closed:
            ranges.append(Range(name, start, end, thread))
        elif event in (MARK, None) and not closed and value is not None:
            counts.append(Count(name, start, value))
    if not ranges:
        raise wrong("FILE", f"ranges of the NVTX domain {DOMAIN!r}", f"{path} without", RECORD)
    return ranges, counts, notes


def _calls(tables: Tables) -> Iterator[Call]:
    columns = ("nameId", "start", "end", "globalTid", "correlationId")
    for name, start, end, thread, correlation in tables.rows(CALLS, *columns):
        yield Call(
            _without_version(tables.text(name)),
            start,
            end,
            process_of(thread),
            thread,
            correlation or None,
        )


def _without_version(name: str) -> str:
    """cudaGraphLaunch_ptsz_v10000 -> cudaGraphLaunch, cuLaunchKernel stays."""
    stem, _, version = name.rpartition("_v")
    return (stem if version.isdigit() else name).removesuffix("_ptsz")


def _activities(tables: Tables, kind: Kind) -> Iterator[Activity]:
    names = ("shortName", "demangledName", "mangledName", "name")
    columns = ("start", "end", "globalPid", "correlationId", "graphNodeId", "bytes", "copyKind")
    ways, memories = _ways(tables), _pageable(tables)
    rows = tables.rows(WORK[kind], *columns, "srcKind", "dstKind", *names)
    for start, end, process, correlation, node, num_bytes, way, source, target, *texts in rows:
        copies = kind is Kind.COPY
        yield Activity(
            kind=kind,
            name=tables.text(*texts) or (kind.value if kind is not Kind.KERNEL else "unnamed"),
            start=start,
            end=end,
            process=process_of(process),
            correlation=correlation or None,
            node=node or None,
            way=ways.get(way, Way.OTHER) if copies else None,
            num_bytes=num_bytes or 0,
            pageable=copies and bool(memories & {source, target}),
        )


def _ways(tables: Tables) -> dict[int, Way]:
    named = dict(tables.rows("ENUM_CUDA_MEMCPY_OPER", "id", "name"))
    if not named:
        return WAYS
    ends = {"HTOD": Way.TO_DEVICE, "DTOH": Way.TO_HOST}
    return {
        number: way
        for number, name in named.items()
        for end, way in ends.items()
        if str(name).endswith(end)
    }


def _pageable(tables: Tables) -> set[int]:
    """Numbers of pageable host memory; none where the export does not say."""
    named = tables.rows("ENUM_CUDA_MEM_KIND", "id", "name")
    return {number for number, name in named if "PAGEABLE" in str(name).upper()}


def _runs(tables: Tables) -> Iterator[GraphRun]:
    columns = ("start", "end", "globalPid", "correlationId", "graphId", "graphExecId")
    for start, end, process, correlation, graph, executable in tables.rows(RUNS, *columns):
        if end and end >= start:  # others were cut off by the end of the recording
            yield GraphRun(
                start, end, process_of(process), correlation or None, graph or executable or 0
            )


def _creations(tables: Tables) -> Iterator[Creation]:
    columns = ("start", "globalTid", "graphNodeId", "originalGraphNodeId")
    for start, thread, node, original in tables.rows(CREATIONS, *columns):
        if node:
            yield Creation(start, process_of(thread), thread, node, original or None)
