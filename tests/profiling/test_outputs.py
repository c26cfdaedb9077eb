"""The command, its JSON, the page and the trace for Perfetto."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from graphattn.cli import main
from graphattn.profiling.page import page
from graphattn.profiling.perfetto import TRACKS, trace_json
from graphattn.profiling.report import analyse
from tests.profiling.exports import write_sqlite
from tests.profiling.recording import as_graph_level, by_stage, served

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["numpy"] = sys.modules["nvtx"] = None
from graphattn.cli import main
sys.exit(main(["profile-report", sys.argv[1]]))
"""


class Page(HTMLParser):
    """Collects what a browser would fetch, and whether tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "data")]
        if tag in ("script", "link", "iframe", "img"):
            self.fetched.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Closes itself."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read_page(text: str) -> Page:
    found = Page()
    found.feed(text)
    found.close()
    assert found.open == []
    assert found.fetched == []
    assert "url(" not in text
    assert "@import" not in text
    return found


def test_the_command_prints_a_report_and_says_by_its_code_whether_it_found_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clean = write_sqlite(tmp_path / "clean.sqlite", served().profile())
    slow = write_sqlite(tmp_path / "slow.sqlite", served(pauses={3: 10**6}).profile())
    assert main(["profile-report", str(clean)]) == 0
    assert "nothing found that slows the loop down" in capsys.readouterr().out
    assert main(["profile-report", str(slow), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert found["stages"] == by_stage(6)
    assert found["total"] == sum(x["ns"] for x in found["shares"]) == sum(found["stages"].values())
    assert found["findings"][0]["kind"] == "host gap"
    assert main(["profile-report", str(tmp_path / "none")]) == 2
    assert "FILE: wanted an existing file" in capsys.readouterr().err
    assert main(["profile-report", str(clean), "--html", str(tmp_path)]) == 2
    assert "--html: wanted a file that can be written" in capsys.readouterr().err


def test_a_machine_without_torch_can_report(tmp_path: Path) -> None:
    path = write_sqlite(tmp_path / "a.sqlite", served().profile())
    command = [sys.executable, "-c", WITHOUT_TORCH, path]
    assert "all replayed nodes" in subprocess.check_output(command, text=True)


def test_the_page_is_whole_and_loads_nothing(tmp_path: Path) -> None:
    path = write_sqlite(tmp_path / "a.sqlite", served(pauses={3: 10**6}).profile())
    out = tmp_path / "a.html"
    assert main(["profile-report", str(path), "--html", str(out)]) == 1
    found = read_page(out.read_text())
    for words in ("GPU time by stage", "model layer 1", "host gap", "decode-8", "attend_decode"):
        assert words in found.text
    for bar in re.findall(r"<div class='bar'>(.*?)</div>", out.read_text()):
        assert sum(map(float, re.findall(r"width:([\d.]+)%", bar))) <= 100.1


def test_names_cannot_break_the_page() -> None:
    recorded = served().profile()
    wild = [replace(x, name="void f<'a', \"b\">(T & x)</td><script>") for x in recorded.activities]
    profile = replace(recorded, activities=wild)
    report, replays = analyse(profile)
    assert (
        "void f<'a', \"b\">(T & x)</td><script>" in read_page(page(report, profile, replays)).text
    )


def test_a_page_of_a_graph_level_trace_has_what_was_recorded() -> None:
    profile = as_graph_level(served().profile())
    report, replays = analyse(profile)
    text = read_page(page(report, profile, replays)).text
    assert "Idle time between replays" in text
    assert "GPU time by stage" not in text


def test_a_page_of_one_replay_has_no_gaps() -> None:
    profile = served(replays=1).profile()
    report, replays = analyse(profile)
    assert "One replay has nothing beside it." in read_page(page(report, profile, replays)).text


def test_the_trace_for_the_viewer_adds_up_and_nests() -> None:
    profile = served(replays=4, pauses={2: 10**6}).profile()
    report, replays = analyse(profile)
    events = json.loads(trace_json(profile, replays, report.gaps))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert all(event["ts"] >= 0 for event in slices)
    by_track: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for event in slices:
        end = round(event["ts"] + event["dur"], 3)
        by_track[TRACKS[event["tid"]]].append((event["ts"], end, event["name"]))
    assert len(by_track["replays"]) == 4
    nodes = sum(end - start for start, end, _ in by_track["nodes"])
    assert nodes == pytest.approx(report.total / 1e3)
    stages = sum(end - start for start, end, name in by_track["stages"])
    assert stages == pytest.approx(report.total / 1e3)
    for track in ("replays", "idle", "stages", "layers", "nodes"):
        spans = sorted(by_track[track])
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(spans)), track
    idle = max(end - start for start, end, _ in by_track["idle"])
    assert idle > 1_000
    counters = [event for event in events if event["ph"] == "C"]
    assert {event["name"] for event in counters} == {"live_rows", "pages_taken"}
    named = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert named == set(TRACKS)
