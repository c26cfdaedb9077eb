"""Ranges are free without a tool, and reach one that listens."""

import os
import subprocess
import sys
from pathlib import Path

from graphattn._capture import nvtx_ranges

PROGRAM = """
from graphattn._capture import nvtx_ranges
assert nvtx_ranges.enabled()
with nvtx_ranges.scope("outer"):
    for _ in range(2):
        with nvtx_ranges.scope("inner"):
            pass
try:
    with nvtx_ranges.scope("failing"):
        raise KeyError
except KeyError:
    pass
replay = nvtx_ranges.prepared("replay.decode8")
nvtx_ranges.push(replay)
nvtx_ranges.pop()
"""
EXPECTED = """
push graphattn outer
push graphattn inner
pop graphattn
push graphattn inner
pop graphattn
pop graphattn
push graphattn failing
pop graphattn
push graphattn replay.decode8
pop graphattn
"""


def test_free_without_a_tool() -> None:
    assert not nvtx_ranges.enabled()
    with nvtx_ranges.scope("stage") as value:
        assert value is None
    assert nvtx_ranges.scope("stage") is nvtx_ranges.scope("stage")
    nvtx_ranges.push(nvtx_ranges.prepared("stage"))
    nvtx_ranges.pop()


def test_a_tool_sees_names_and_nesting(tmp_path: Path) -> None:
    listener, log = tmp_path / "listener.so", tmp_path / "log"
    source = Path(__file__).with_name("nvtx_listener.c")
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", listener, source], check=True)
    environment = os.environ | {"NVTX_INJECTION64_PATH": str(listener), "NVTX_TEST_LOG": str(log)}
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, env=environment)
    assert log.read_text() == EXPECTED.lstrip()
