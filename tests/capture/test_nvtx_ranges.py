"""Ranges are free without a tool, and reach one that listens."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from graphattn._capture import nvtx_ranges
from tests.nvtx_listener import hear

PROGRAM = """
from graphattn._capture import nvtx_ranges
assert nvtx_ranges.enabled()
with nvtx_ranges.scope("outer"):
    for i in range(2):
        with nvtx_ranges.scope("inner"):
            nvtx_ranges.count("rows", 7 * i)
try:
    with nvtx_ranges.scope("failing"):
        raise KeyError
except KeyError:
    pass
assert nvtx_ranges.within("named", len)([1, 2]) == 2
"""
EXPECTED = """
push graphattn outer
push graphattn inner
mark graphattn rows 0
pop graphattn
push graphattn inner
mark graphattn rows 7
pop graphattn
pop graphattn
push graphattn failing
pop graphattn
push graphattn named
pop graphattn
"""


def test_free_without_a_tool() -> None:
    assert not nvtx_ranges.enabled()
    assert not nvtx_ranges.listening()
    with nvtx_ranges.scope("stage") as value:
        assert value is None
    assert nvtx_ranges.scope("stage") is nvtx_ranges.scope("stage")
    nvtx_ranges.count("rows", 1)
    assert nvtx_ranges.within("stage", len)([1, 2]) == 2


def test_a_tool_sees_names_nesting_and_values(tmp_path: Path) -> None:
    assert hear(PROGRAM, tmp_path).lines == EXPECTED.split("\n")[1:-1]


def test_the_profiler_of_torch_sees_names_and_nesting() -> None:
    named = nvtx_ranges.within("named", lambda: torch.ones(2) + 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert nvtx_ranges.listening()
        with nvtx_ranges.scope("outer"), nvtx_ranges.scope("inner"):
            named()
        with pytest.raises(KeyError), nvtx_ranges.scope("failing"):
            raise KeyError
    parents = {event.name: event.cpu_parent for event in profile.events()}
    assert parents["aten::add"].name == "graphattn/named"
    assert parents["graphattn/named"].name == "graphattn/inner"
    assert parents["graphattn/inner"].name == "graphattn/outer"
    assert parents["graphattn/outer"] is parents["graphattn/failing"] is None


def test_without_the_package_nobody_listens_and_everything_runs() -> None:
    script = """
import sys
sys.modules["nvtx"] = None
from graphattn._capture import nvtx_ranges
assert not nvtx_ranges.enabled() and not nvtx_ranges.listening()
with nvtx_ranges.scope("outer"):
    nvtx_ranges.count("rows", 7)
assert nvtx_ranges.within("named", len)([1, 2]) == 2
"""
    subprocess.run([sys.executable, "-c", script], check=True)
