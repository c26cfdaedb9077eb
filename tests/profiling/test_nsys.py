"""The sqlite export of nsys, over every version of its schema."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from graphattn.errors import ConfigError
from graphattn.profiling.events import Activity, Creation, Kind, Profile, Range
from graphattn.profiling.reading import read_profile
from graphattn.profiling.report import ProfileReport, report_of
from graphattn.profiling.shares import UNATTRIBUTED
from tests.profiling.exports import Schema, write_sqlite
from tests.profiling.recording import (
    LAUNCH_CALLS,
    Recorder,
    as_graph_level,
    by_stage,
    nodes_in,
    served,
    step_nodes,
)

SCHEMAS = {
    "as documented": Schema(),
    "names as text": Schema(registered=False),
    "everything NOT NULL": Schema(defaults=True),
    "names as text, NOT NULL": Schema(registered=False, defaults=True),
    "no textId": Schema(registered=False, without=frozenset({"NVTX_EVENTS.textId"})),
    "no domainId": Schema(without=frozenset({"NVTX_EVENTS.domainId"})),
    "unsigned payloads": Schema(payload="uint64Value"),
    "demangled names only": Schema(names="demangledName"),
    "no metadata": Schema(
        without=frozenset({"META_DATA_EXPORT", "ENUM_CUDA_MEMCPY_OPER", "ENUM_CUDA_MEM_KIND"})
    ),
    "no creations": Schema(without=frozenset({"CUDA_GRAPH_NODE_EVENTS"})),
    "no originals": Schema(without=frozenset({"CUDA_GRAPH_NODE_EVENTS.originalGraphNodeId"})),
    "no node ids": Schema(
        without=frozenset(
            {
                "CUPTI_ACTIVITY_KIND_KERNEL.graphNodeId",
                "CUPTI_ACTIVITY_KIND_MEMCPY.graphNodeId",
                "CUPTI_ACTIVITY_KIND_MEMSET.graphNodeId",
            }
        )
    ),
}


BY_ORDER_ONLY = {"no creations", "no originals", "no node ids"}


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., ProfileReport]:
    def of(profile: Profile, schema: Schema = SCHEMAS["as documented"]) -> ProfileReport:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.sqlite"
        return report_of(read_profile(write_sqlite(path, profile, schema)))

    return of


Report = Callable[..., ProfileReport]


def only_by_creation(profile: Profile) -> Profile:
    """Without the calls by whose order nodes could be attributed."""
    launches = set(LAUNCH_CALLS.values())
    return replace(profile, calls=[x for x in profile.calls if x.name not in launches])


def what(x: Activity) -> tuple[object, ...]:
    """All but the name, which copies have not, in an order that sorts."""
    return (x.start, x.end, str(x.kind), str(x.way), x.node or 0, x.num_bytes, x.correlation)


def test_what_is_read_is_what_was_recorded(tmp_path: Path) -> None:
    recorded = served().profile()
    found = read_profile(write_sqlite(tmp_path / "a.sqlite", recorded))
    assert found.ranges == recorded.ranges
    assert found.counts == recorded.counts
    assert found.calls == recorded.calls
    assert found.creations == recorded.creations
    assert sorted(map(what, found.activities)) == sorted(map(what, recorded.activities))
    assert found.source == "nsys, export schema 3.20.3"
    assert found.notes == ()


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_every_schema_gives_the_same_report(schema: Schema, report: Report) -> None:
    found = report(served().profile(), schema)
    assert found.stages() == by_stage(6)
    assert found.total == sum(by_stage(6).values())
    assert found.layers()["model", 1] == {
        "attend": 6 * (1_100 + 5_100),
        "mlp": 6 * 9_000,
        "rest": 6 * 8_900,
    }
    assert [(x.bucket, x.replays, x.nodes) for x in found.buckets] == [
        ("decode-8", 5, 17),
        ("decode-1", 1, 17),
    ]
    assert found.buckets[0].launch == 5_000
    assert found.counters["live_rows"] == (3, 3, 8)
    assert found.findings == ()


@pytest.mark.parametrize("name", sorted({*SCHEMAS} - BY_ORDER_ONLY))
def test_creations_alone_are_enough(name: str, report: Report) -> None:
    found = report(only_by_creation(served().profile()), SCHEMAS[name])
    assert found.stages() == by_stage(6)


def test_without_calls_of_the_host_nodes_keep_their_places(report: Report) -> None:
    schema = Schema(without=frozenset({"CUPTI_ACTIVITY_KIND_RUNTIME"}))
    found = report(served(pauses={3: 10**6}).profile(), schema)
    assert found.stages() == by_stage(6)
    assert found.buckets[0].launch is None
    assert "launch times, waits and the cause of gaps are unknown" in " ".join(found.notes)
    assert "what the host did was not recorded" in found.findings[0].text


def test_creations_noted_at_the_end_of_a_capture_go_by_the_order_of_launches(
    report: Report,
) -> None:
    assert report(served(at_end=True).profile()).stages() == by_stage(6)


def test_what_a_launch_calls_and_what_ran_at_once_are_no_nodes(report: Report) -> None:
    """The runtime's launch calls the driver's; and a capture may be begun by work of its own."""
    recorder = served(at_end=True)
    for call in [x for x in recorder.calls if x.name == "cudaLaunchKernel"]:
        recorder.now = call.start + 2
        recorder.call("cuLaunchKernel", 10)
    for capture in [x for x in recorder.ranges if x.name.startswith("capture.")]:
        recorder.now = capture.start + 1
        call = recorder.call("cudaMemsetAsync", 5)
        start = capture.start + 50
        recorder.activities.append(
            Activity(Kind.SET, "memset", start, start + 5, recorder.process, call.correlation)
        )
    assert report(recorder.profile()).stages() == by_stage(6)


def test_an_order_that_does_not_fit_is_not_believed(report: Report) -> None:
    """One launch more in the capture than nodes in a replay: nobody knows which it was."""
    recorder = served(at_end=True)
    for capture in [x for x in recorder.ranges if x.name.startswith("capture.")]:
        recorder.now = capture.start + 1
        recorder.call("cudaLaunchKernel", 5)
    assert set(report(recorder.profile()).stages()) == {"outside the stages"}


def test_clones_of_clones_lead_to_the_captured_node(report: Report) -> None:
    """An instantiated graph may be cloned again, and a clone may have a creation of its own too."""
    recorded = served().profile()
    again = [
        replace(x, node=x.node + 10**6, original=x.node)
        for x in recorded.creations
        if x.original is not None
    ]
    own = [replace(x, original=None) for x in again]
    played = [x if x.node is None else replace(x, node=x.node + 10**6) for x in recorded.activities]
    creations: list[Creation] = [*own, *recorded.creations, *again]
    cloned = replace(recorded, creations=creations, activities=played)
    assert report(only_by_creation(cloned)).stages() == by_stage(6)


def test_a_later_event_of_a_node_does_not_move_it(report: Report) -> None:
    """Parameters of a captured node may be updated, inside whatever range."""
    recorded = served().profile()
    captured = [x for x in recorded.creations if x.original is None]
    span = Range("commit", 300_000, 300_100, captured[0].thread)
    updates = [replace(x, time=300_050) for x in captured]
    later = replace(
        recorded,
        ranges=[*recorded.ranges, span],
        creations=[*updates, *recorded.creations],
    )
    assert report(only_by_creation(later)).stages() == by_stage(6)


def test_a_capture_outside_the_recording_is_listed_as_unattributed(report: Report) -> None:
    recorded = served().profile()
    late = replace(
        recorded,
        creations=[],
        ranges=[x for x in recorded.ranges if x.name.startswith(("replay", "copy", "wait"))],
    )
    found = report(late)
    assert found.stages() == {UNATTRIBUTED: sum(by_stage(6).values())}
    assert found.total == sum(x.duration for x in nodes_in(recorded))
    assert f"102 of 102 replayed nodes are {UNATTRIBUTED}" in found.notes[-1]


def test_two_processes_with_the_same_numbers_are_kept_apart(report: Report) -> None:
    """Ranks number their nodes and calls alike."""
    first, second = served(), served(process=99, replays=4, layers=3)
    both = first.profile(), second.profile()
    whole = Profile(
        "two ranks",
        *(
            [*getattr(both[0], part), *getattr(both[1], part)]
            for part in ("ranges", "counts", "calls", "activities", "runs", "creations")
        ),
    )
    found = report(whole)
    expected = {stage: by_stage(6)[stage] + by_stage(4, layers=3)[stage] for stage in by_stage(6)}
    assert found.stages() == expected
    assert found.processes == 2
    assert len(found.gaps) == 5 + 3
    assert sum(bucket.replays for bucket in found.buckets) == 10


def test_a_graph_level_trace_has_spans_gaps_and_launches(report: Report) -> None:
    recorded = served(pauses={3: 10**6}).profile()
    found = report(as_graph_level(recorded))
    assert found.shares == ()
    span = sum(node.ns for node in step_nodes())
    assert [(x.bucket, x.replays, x.span, x.launch) for x in found.buckets] == [
        ("decode-8", 5, span, 5_000),
        ("decode-1", 1, span, 5_000),
    ]
    assert [x.kind for x in found.findings] == ["host gap"]
    assert "--cuda-graph-trace=node" in found.notes[-1]


def test_a_replay_that_was_recorded_at_both_levels_counts_once(report: Report) -> None:
    recorded = served().profile()
    both = replace(recorded, runs=as_graph_level(recorded).runs)
    found = report(both)
    assert found.stages() == by_stage(6)
    assert sum(bucket.replays for bucket in found.buckets) == 6


def test_launches_cut_off_by_the_end_of_the_recording_do_not_count(report: Report) -> None:
    recorded = as_graph_level(served().profile())
    runs = [*recorded.runs[:-1], replace(recorded.runs[-1], end=0)]
    assert sum(x.replays for x in report(replace(recorded, runs=runs)).buckets) == 5


def test_nodes_of_a_graph_level_trace_are_counted_where_one_graph_was_captured(
    report: Report,
) -> None:
    recorder = Recorder()
    step = step_nodes()
    recorder.replay("decode-8", step, recorder.capture("decode-8", step))
    recorded = recorder.profile()
    whole = replace(as_graph_level(recorded), creations=recorded.creations)
    assert report(whole).buckets[0].nodes == len(step)


def drop(path: Path, *tables: str) -> Path:
    with closing(sqlite3.connect(path)) as database:
        for table in tables:
            database.execute(f"drop table {table}")
        database.commit()
    return path


def other_database(folder: Path) -> Path:
    path = folder / "notes.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.execute("create table notes (text)")
        database.commit()
    return path


def written(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


def without_nvtx(folder: Path) -> Path:
    return drop(write_sqlite(folder / "a.sqlite", served().profile()), "NVTX_EVENTS")


def of_another_domain(folder: Path) -> Path:
    path = write_sqlite(folder / "a.sqlite", served().profile())
    with closing(sqlite3.connect(path)) as database:
        database.execute("update NVTX_EVENTS set text = 'theirs' where text = 'graphattn'")
        database.commit()
    return path


def without_cuda(folder: Path) -> Path:
    empty = replace(served().profile(), activities=[])
    return write_sqlite(folder / "a.sqlite", empty)


def without_replays(folder: Path) -> Path:
    recorded = served().profile()
    alone = [x for x in recorded.activities if x.node is None]
    return write_sqlite(folder / "a.sqlite", replace(recorded, activities=alone))


WRONG = {
    "no file": (lambda folder: folder / "none", "an existing file", "profiles/nsys.sh"),
    "an empty file": (lambda folder: written(folder, "a", b""), "got 'empty'", "profiles/nsys.sh"),
    "another file": (lambda f: written(f, "a.txt", b"text"), "begins with b'text'", "nsys.sh"),
    "a report": (lambda f: written(f, "a.nsys-rep", b"NSYS"), "sqlite export", "nsys export"),
    "a broken database": (
        lambda f: written(f, "a.sqlite", b"SQLite format 3\x00" + 200 * b"\xff"),
        "an sqlite export of nsys",
        "nsys export",
    ),
    "another database": (other_database, "with notes", "nsys export"),
    "no ranges": (without_nvtx, "without a table NVTX_EVENTS", "--trace=cuda,nvtx"),
    "no ranges of ours": (of_another_domain, "domain 'graphattn'", "--trace=cuda,nvtx"),
    "no CUDA": (without_cuda, "with CUDA work", "--cuda-graph-trace=node"),
    "no replays": (without_replays, "replays of CUDA graphs", 'backend="cuda"'),
}


@pytest.mark.parametrize(("make", "got", "fix"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_reported_says_what_is_wanted(
    make: Callable[[Path], Path], got: str, fix: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as raised:
        report_of(read_profile(make(tmp_path)))
    assert got in str(raised.value)
    assert fix in str(raised.value)
