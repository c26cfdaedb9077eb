"""profiles/nsys.sh, with an nsys that exports a recording of the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.profiling.exports import write_sqlite
from tests.profiling.recording import as_graph_level, served

SCRIPT = Path(__file__).parents[2] / "profiles" / "nsys.sh"
NSYS = """#!/bin/sh
# as nsys does: `profile` runs the command behind its options, `export` writes what was asked for
echo "$*" >>"$FOLDER/called"
case $1 in
  profile)
    for word; do
      case $word in
        profile|--*) shift ;;
        *) break ;;
      esac
    done
    "$@" || exit $?
    ;;
  export)
    for word; do
      case $word in --output=*) to=${word#--output=} ;; esac
    done
    level=${to##*/}
    cp "$FOLDER/recorded-$level" "$to"
    ;;
esac
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "nsys").write_text(NSYS)
    (tools / "nsys").chmod(0o755)
    (tools / "python3").symlink_to(sys.executable)
    recorded = served(pauses={3: 10**6}).profile()
    write_sqlite(tmp_path / "recorded-node.sqlite", recorded)
    write_sqlite(tmp_path / "recorded-graph.sqlite", as_graph_level(recorded))
    return os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "FOLDER": str(tmp_path)}


def recipe(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *arguments], env=environment, capture_output=True, text=True, check=False
    )


def test_both_levels_are_recorded_exported_and_reported(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    out = tmp_path / "out"
    ran = recipe("--out", str(out), "sh", "-c", "echo ran", environment=environment)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("\nran\n") == 2
    assert "all replayed nodes" in ran.stdout
    assert ran.stdout.count("host gap:") == 2
    called = (tmp_path / "called").read_text()
    for level in ("node", "graph"):
        assert f"profile --trace=cuda,nvtx --cuda-graph-trace={level} " in called
        assert (out / f"{level}.sqlite").is_file()
        assert (out / f"{level}.html").read_text().startswith("<!doctype html>")


def test_a_failed_recording_fails_the_recipe(tmp_path: Path, environment: dict[str, str]) -> None:
    ran = recipe("--out", str(tmp_path / "out"), "false", environment=environment)
    assert ran.returncode == 1
    assert "node: nsys failed" in ran.stdout
    assert "graph: nsys failed" in ran.stdout


def test_dry_prints_the_commands(environment: dict[str, str], tmp_path: Path) -> None:
    ran = recipe("--dry", environment=environment)
    assert ran.returncode == 0
    assert ran.stdout.count("+ nsys profile ") == ran.stdout.count("+ nsys export ") == 2
    assert "-m profiles.gpu_traces" in ran.stdout
    assert "profile-report FOLDER/node.sqlite --html FOLDER/node.html" in ran.stdout
    assert not (tmp_path / "called").exists()


def test_without_nsys_it_says_where_it_comes_from(
    environment: dict[str, str], tmp_path: Path
) -> None:
    few = tmp_path / "few"
    few.mkdir()
    for tool in ("bash", "dirname", "sed"):
        (few / tool).symlink_to(str(shutil.which(tool)))
    ran = recipe(environment=environment | {"PATH": str(few)})
    assert ran.returncode == 2
    assert "nsys is not on PATH" in ran.stdout
    assert "+ nsys profile --trace=cuda,nvtx --cuda-graph-trace=node" in ran.stdout
