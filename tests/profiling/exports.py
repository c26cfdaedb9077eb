"""Writes a profile as nsys exports it, in a schema of choice, and as torch.profiler does.

Tables and columns are those of the documented schema; in old ones every column is NOT NULL, and
what is missing is 0 or an empty text.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphattn.profiling.events import Activity, Kind, Profile, Way

COMMON = ("deviceId", "contextId", "streamId")
COLUMNS = {
    "StringIds": ("id", "value"),
    "META_DATA_EXPORT": ("name", "value"),
    "ENUM_CUDA_MEMCPY_OPER": ("id", "name", "label"),
    "ENUM_CUDA_MEM_KIND": ("id", "name", "label"),
    "NVTX_EVENTS": (
        *("start", "end", "eventType", "rangeId", "category", "color", "text", "globalTid"),
        *("endGlobalTid", "textId", "domainId", "uint64Value", "int64Value", "doubleValue"),
        *("uint32Value", "int32Value", "floatValue", "jsonTextId", "jsonText"),
    ),
    "CUPTI_ACTIVITY_KIND_RUNTIME": (
        *("start", "end", "eventClass", "globalTid", "correlationId", "nameId", "returnValue"),
    ),
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        *("start", "end", *COMMON, "correlationId", "globalPid", "demangledName", "shortName"),
        *("mangledName", "registersPerThread", "gridX", "blockX", "graphNodeId"),
    ),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (
        *("start", "end", *COMMON, "correlationId", "globalPid", "bytes", "copyKind", "srcKind"),
        *("dstKind", "graphNodeId"),
    ),
    "CUPTI_ACTIVITY_KIND_MEMSET": (
        *("start", "end", *COMMON, "correlationId", "globalPid", "value", "bytes", "graphNodeId"),
    ),
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": (
        *("start", "end", *COMMON, "correlationId", "globalPid", "graphId", "graphExecId"),
    ),
    "CUDA_GRAPH_NODE_EVENTS": (
        *("start", "end", "eventClass", "globalTid", "nameId", "graphNodeId"),
        "originalGraphNodeId",
    ),
}
WORK = {
    Kind.KERNEL: "CUPTI_ACTIVITY_KIND_KERNEL",
    Kind.COPY: "CUPTI_ACTIVITY_KIND_MEMCPY",
    Kind.SET: "CUPTI_ACTIVITY_KIND_MEMSET",
}
DOMAIN_ID, OTHER_DOMAIN = 3, 9


@dataclass(frozen=True)
class Schema:
    """How one version of the exporter writes."""

    without: frozenset[str] = frozenset()  # tables, or TABLE.COLUMN
    registered: bool = True  # names of ranges as ids of StringIds
    defaults: bool = False  # NOT NULL columns: 0 and "" in place of NULL
    payload: str = "int64Value"
    names: str = "shortName"  # the kernel column that has the name


def write_sqlite(path: Path, profile: Profile, schema: Schema = Schema()) -> Path:
    """The database of `nsys export --type sqlite`. Tables without rows are not made."""
    strings: dict[str, int] = {}

    def number(text: str) -> int:
        return strings.setdefault(text, len(strings) + 1)

    rows = {
        "META_DATA_EXPORT": [{"name": "EXPORT_SCHEMA_VERSION", "value": "3.20.3"}],
        "ENUM_CUDA_MEMCPY_OPER": [
            {"id": 1, "name": "CUDA_MEMCPY_KIND_HTOD", "label": "Host-to-Device"},
            {"id": 2, "name": "CUDA_MEMCPY_KIND_DTOH", "label": "Device-to-Host"},
            {"id": 8, "name": "CUDA_MEMCPY_KIND_DTOD", "label": "Device-to-Device"},
        ],
        "ENUM_CUDA_MEM_KIND": [
            {"id": 0, "name": "CUDA_MEMOPR_MEMORY_KIND_PAGEABLE", "label": "Pageable"},
            {"id": 1, "name": "CUDA_MEMOPR_MEMORY_KIND_PINNED", "label": "Pinned"},
            {"id": 2, "name": "CUDA_MEMOPR_MEMORY_KIND_DEVICE", "label": "Device"},
        ],
        "NVTX_EVENTS": list(_nvtx(profile, schema, number)),
        "CUPTI_ACTIVITY_KIND_RUNTIME": [
            {
                "start": x.start,
                "end": x.end,
                "globalTid": x.thread,
                "correlationId": x.correlation,
                "nameId": number(f"{x.name}_v10000"),
                "returnValue": 0,
            }
            for x in profile.calls
        ],
        "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": [
            _placed(x) | {"graphId": x.graph, "graphExecId": x.graph + 1} for x in profile.runs
        ],
        "CUDA_GRAPH_NODE_EVENTS": [
            {
                "start": x.time,
                "end": x.time,
                "globalTid": x.thread,
                "nameId": number("Graph Node Creation"),
                "graphNodeId": x.node,
                "originalGraphNodeId": x.original,
            }
            for x in profile.creations
        ],
    }
    for kind, table in WORK.items():
        rows[table] = [
            _placed(x) | {"graphNodeId": x.node} | _of_kind(x, schema, number)
            for x in profile.activities
            if x.kind is kind
        ]
    rows["StringIds"] = [{"id": i, "value": text} for text, i in strings.items()]
    with closing(sqlite3.connect(path)) as database:
        for table, columns in COLUMNS.items():
            if table not in schema.without and rows[table]:
                kept = [c for c in columns if f"{table}.{c}" not in schema.without]
                _insert(database, table, kept, rows[table], schema)
        database.commit()
    return path


def _insert(
    database: sqlite3.Connection,
    table: str,
    columns: list[str],
    rows: Iterable[dict[str, Any]],
    schema: Schema,
) -> None:
    texts = {"text", "value", "name", "label", "jsonText"} - (
        {"value"} if "MEMSET" in table else set()
    )
    nothing = {c: ("" if c in texts else 0) if schema.defaults else None for c in columns}
    database.execute(f"create table {table} ({', '.join(columns)})")
    marks = ", ".join("?" * len(columns))
    values = (
        [row.get(c) if row.get(c) is not None else nothing[c] for c in columns] for row in rows
    )
    database.executemany(f"insert into {table} values ({marks})", values)


def _placed(x: Any) -> dict[str, Any]:
    return {
        "start": x.start,
        "end": x.end,
        "streamId": 7,
        "correlationId": x.correlation,
        "globalPid": x.process << 24,
    }


def _of_kind(x: Activity, schema: Schema, number: Any) -> dict[str, Any]:
    if x.kind is Kind.KERNEL:
        return {schema.names: number(x.name)}
    if x.kind is Kind.SET:
        return {"bytes": x.num_bytes, "value": 0}
    host = 0 if x.pageable else 1
    kinds = {Way.TO_DEVICE: (1, host, 2), Way.TO_HOST: (2, 2, host), Way.OTHER: (8, 2, 2)}
    way, source, target = kinds[x.way or Way.OTHER]
    return {"bytes": x.num_bytes, "copyKind": way, "srcKind": source, "dstKind": target}


def _nvtx(profile: Profile, schema: Schema, number: Any) -> Iterable[dict[str, Any]]:
    for process in sorted({(x.thread or 0) >> 24 for x in profile.ranges}):
        for domain, name in ((DOMAIN_ID, "graphattn"), (OTHER_DOMAIN, "NCCL")):
            made = {"start": 0, "eventType": 75, "domainId": domain, "globalTid": process << 24}
            yield made | {"text": name}
        other = {"start": 5, "end": 10**12, "eventType": 59, "globalTid": process << 24 | 7}
        yield other | {"text": "ncclAllReduce", "domainId": OTHER_DOMAIN}
    for x in profile.ranges:
        event = {"start": x.start, "end": x.end, "eventType": 59, "globalTid": x.thread}
        yield event | {"domainId": DOMAIN_ID} | _named(x.name, schema, number)
    thread = next((x.thread for x in profile.ranges), None)
    for y in profile.counts:
        event = {"start": y.time, "eventType": 34, "globalTid": thread, "domainId": DOMAIN_ID}
        yield event | {schema.payload: y.value} | _named(y.name, schema, number)


def _named(name: str, schema: Schema, number: Any) -> dict[str, Any]:
    return {"textId": number(name)} if schema.registered else {"text": name}


def write_trace(path: Path, profile: Profile, *, node_ids: bool = True) -> Path:
    """The JSON of torch.profiler: no node creations, no counters, microseconds."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}}
    ]
    for x in profile.ranges:
        events.append(_event(x, "cpu_op", f"graphattn/{x.name}", (x.thread or 0) >> 24, x.thread))
    for call in profile.calls:
        event = _event(call, "cuda_runtime", call.name, call.process, call.thread)
        events.append(event | {"args": {"correlation": call.correlation}})
    categories = {Kind.KERNEL: "kernel", Kind.COPY: "gpu_memcpy", Kind.SET: "gpu_memset"}
    for work in profile.activities:
        event = _event(work, categories[work.kind], work.name, 0, 7)
        arguments: dict[str, Any] = {"correlation": work.correlation, "bytes": work.num_bytes}
        if node_ids:
            arguments["graph node id"] = work.node or 0
        events.append(event | {"args": arguments})
    events.append({"ph": "i", "name": "Record Window End", "ts": 0.0})
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


def _event(x: Any, category: str, name: str, process: object, thread: object) -> dict[str, Any]:
    times = {"ts": x.start / 1e3, "dur": (x.end - x.start) / 1e3}
    return {"ph": "X", "cat": category, "name": name, "pid": process, "tid": thread} | times
