"""What an engine says of its graphs and its memory, as text, as data, and as a difference."""

import json
from dataclasses import FrozenInstanceError, replace
from types import SimpleNamespace
from typing import Any

import pytest

from graphattn import EngineReport, NGram, capture
from graphattn._capture.graph import GraphInfo
from graphattn.config import Bucket
from graphattn.difference import Change, difference
from graphattn.report import bucket_report, node_counts
from tests.runtime.tiny_model import TinyModel

BOUNDS: dict[str, Any] = {"max_batch": 3, "max_tokens": 16, "page_size": 8, "num_pages": 40}
LAYERS = 3


def report(steps: int = 0, layers: int = LAYERS, **options: Any) -> EngineReport:
    model = TinyModel(windows=(0,) * layers)
    with capture(model, buckets=[3], **BOUNDS, **options) as engine:
        if steps:
            engine.generate([[1, 2, 3]], max_new_tokens=steps)
        return engine.report()


@pytest.fixture(scope="module")
def served() -> EngineReport:
    return report(steps=4)


def test_operations_are_counted_by_name(served: EngineReport) -> None:
    """Once per layer what is in the layers, once what is not; kinds and names count the same."""
    assert served.layers == LAYERS
    for bucket in served.buckets:
        assert bucket.operations["graphattn.attend.default"] == LAYERS
        assert bucket.operations["graphattn.kv_write.default"] == LAYERS
        assert bucket.operations["graphattn.prepare.default"] == 1
        assert bucket.operations["graphattn.sample.default"] == 1
        assert sum(bucket.operations.values()) == sum(bucket.kinds.values()) == bucket.nodes
        assert (bucket.host_nodes, bucket.copies) == (0, {})


def test_steps_and_replays_add_up(served: EngineReport) -> None:
    assert served.steps == sum(b.replays for b in served.buckets) == 4
    assert served.fallbacks == 0
    assert {b.name: b.replays for b in served.buckets}["decode-3"] == 3


def test_memory_is_told_as_predicted_and_as_measured(served: EngineReport) -> None:
    predicted, measured = served.predicted.sizes(), served.measured.sizes()
    assert {n: s for n, s in predicted.items() if n != "graphs"} == {
        n: s for n, s in measured.items() if n != "graphs"
    }
    assert measured["graphs"] == sum(b.memory_bytes for b in served.buckets)
    assert measured["pages"] == served.kv_bytes


def test_the_text_names_every_operation_and_every_part(served: EngineReport) -> None:
    assert "4 steps, 0 of them without their graph" in str(served)
    rows = {line.split("  ")[0]: line.split() for line in served.details().splitlines() if line}
    assert rows["pages"][1:] == [f"{served.kv_bytes:,}"] * 2
    attend = rows["graphattn.attend.default"]
    assert attend[1:] == [str(LAYERS), str(LAYERS), "1.00"]
    assert rows["graphattn.prepare.default"][-1] == "0.33"
    assert rows["nodes"][1:] == ["decode-3", "mixed-16", "per", "layer"]


def test_without_graphs_there_are_no_nodes() -> None:
    eager = report(backend="eager")
    assert all(not b.nodes and not b.operations for b in eager.buckets)
    assert eager.measured.graphs is None
    assert "graphs" in eager.details()


def test_the_json_form_is_complete(served: EngineReport) -> None:
    data = json.loads(served.to_json())
    assert data["buckets"]["decode-3"]["operations"]["graphattn.attend.default"] == LAYERS
    assert data["predicted"]["pages"] == data["measured"]["pages"] == served.kv_bytes
    assert data.keys() == set(EngineReport.__slots__)
    with pytest.raises(FrozenInstanceError):
        served.steps = 0  # type: ignore[misc]


def test_a_difference_names_what_changed_and_nothing_else(served: EngineReport) -> None:
    assert str(served.diff(served)) == "no difference"
    larger = report(layers=LAYERS + 1, speculate=NGram(1))
    found = {change.path: change for change in served.diff(larger).changes}
    assert ("page_size",) not in found
    assert found["layers",] == Change(("layers",), LAYERS, LAYERS + 1)
    # with a draft a decode step of 3 rows has 6 places, and is another bucket
    assert found["buckets", "decode-3", "tokens"].after is None
    assert found["buckets", "decode-6", "tokens"].before is None
    attend = ("buckets", "mixed-16", "operations", "graphattn.attend.default")
    line = "buckets / mixed-16 / operations / graphattn.attend.default: 3 -> 4 (+1)"
    assert str(found[attend]) == line
    listed = json.loads(served.diff(larger).to_json())
    assert {"path": list(attend), "before": 3, "after": 4} in listed


def test_a_difference_of_values_of_every_kind() -> None:
    before = {"a": 1000, "b": "x", "c": {"d": 1.5}, "same": None, "gone": True}
    after = {"a": 3000, "b": "y", "c": {"d": 2.0, "new": 7}, "same": None}
    assert str(difference(before, after)).splitlines() == [
        "a: 1,000 -> 3,000 (+2,000)",
        "b: x -> y",
        "c / d: 1.5 -> 2.0 (+0.5)",
        "gone: True -> None",
        "c / new: None -> 7",
    ]


def test_a_bucket_reports_what_the_driver_says_of_its_graph(served: EngineReport) -> None:
    info = GraphInfo(
        node_count=4,
        capture_seconds=2.0,
        memory_bytes=64,
        kinds={"kernel": 2, "memcpy": 1, "host": 1},
        operations={"attend": 2, "memcpy": 1, "host": 1},
        copies={"host to device": 1},
        instantiate_seconds=0.5,
        faults=("node 3 (host) calls the host at every replay",),
    )
    graph: Any = SimpleNamespace(info=info)
    bucket = bucket_report(Bucket(8, mixed=False), graph, replays=9)
    assert (bucket.host_nodes, bucket.instantiate_seconds, bucket.replays) == (1, 0.5, 9)
    assert node_counts(bucket) == {
        "  kernel": 2, "  memcpy": 1, "  host": 1, " host to device": 1,
        "attend": 2, "memcpy": 1, "host": 1,
    }  # fmt: skip
    told = str(replace(served, buckets=(bucket,)))
    assert "decode-8: node 3 (host) calls the host at every replay" in told
    assert "calls the host" not in str(served)
