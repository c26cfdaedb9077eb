"""The trace of torch.profiler gives the same report, where it holds the same."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from graphattn.errors import ConfigError
from graphattn.profiling.events import Way
from graphattn.profiling.reading import read_profile
from graphattn.profiling.report import report_of
from graphattn.profiling.shares import UNATTRIBUTED
from tests.profiling.exports import write_trace
from tests.profiling.recording import by_stage, served


@pytest.mark.parametrize("node_ids", [True, False], ids=["node ids", "correlations only"])
def test_stages_layers_and_launches_are_those_of_the_other_recorder(
    node_ids: bool, tmp_path: Path
) -> None:
    recorded = served(pauses={3: 10**6}).profile()
    found = report_of(read_profile(write_trace(tmp_path / "a.json", recorded, node_ids=node_ids)))
    other = report_of(recorded)
    assert found.stages() == other.stages() == by_stage(6)
    assert found.layers() == other.layers()
    assert found.buckets == other.buckets
    assert found.gaps == other.gaps
    assert found.findings == other.findings
    assert found.counters == {}


def test_a_gzipped_trace_is_read(tmp_path: Path) -> None:
    plain = write_trace(tmp_path / "a.json", served().profile())
    packed = tmp_path / "a.json.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert report_of(read_profile(packed)).stages() == by_stage(6)


def test_copies_have_their_way_and_their_memory(tmp_path: Path) -> None:
    recorder = served()
    recorder.copy(Way.TO_HOST, 4, pageable=True)
    found = read_profile(write_trace(tmp_path / "a.json", recorder.profile()))
    last = max(found.activities, key=lambda x: x.start)
    assert (last.way, last.num_bytes, last.pageable) == (Way.TO_HOST, 4, True)
    assert {x.way for x in found.activities if x.way} == {Way.TO_HOST, Way.TO_DEVICE}
    assert not any(x.pageable for x in found.activities if x is not last)


def test_without_the_capture_nothing_is_attributed(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "a.json", served().profile())
    trace = json.loads(path.read_text())
    trace["traceEvents"] = [
        event for event in trace["traceEvents"] if "capture." not in str(event.get("name"))
    ]
    path.write_text(json.dumps(trace))
    assert report_of(read_profile(path)).stages() == {UNATTRIBUTED: sum(by_stage(6).values())}


WRONG = {
    "cut off": '{"traceEvents": [{"ph": "X"',
    "no events": '{"other": []}',
    "no CUDA": '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": 1}]}',
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_what_is_no_trace_of_ours_says_how_to_record_one(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"export_chrome_trace\(FILE\)"):
        read_profile(path)
