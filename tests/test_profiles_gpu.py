"""`profiles/gpu.sh` and its parts, dry: what a GPU machine runs must not fail for a slip."""

import importlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graphattn.kernels import tiles
from profiles import gpu, gpu_checks, tune
from profiles.attention import decode_attention, gqa
from profiles.peers import Candidate
from profiles.place import Place
from profiles.record import ROOT

SCRIPT = ROOT / "profiles" / "gpu.sh"
DRY = Place(torch.device("cpu"), dry=True)


def parts_of_the_script() -> list[str]:
    (listed,) = re.findall(r"^all=(.*)$", SCRIPT.read_text(), re.MULTILINE)
    return str(listed).split(",")


@pytest.mark.parametrize("part", ["launch", "attention"])
def test_gpu_parts_run_dry(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "records.jsonl"
    monkeypatch.setattr("sys.argv", ["gpu", part, "--dry", "--out", str(out)])
    assert gpu.main() == 0
    assert all(json.loads(line)["part"] == part for line in out.read_text().splitlines())


def test_the_script_knows_every_part_and_begins_with_the_first_question() -> None:
    listed = parts_of_the_script()
    assert listed[0] == "launch"
    assert set(listed) == {*gpu.PARTS, "tests", "tune", "traces"}
    assert gpu.LAUNCH_NODES[0] == 1000
    started = re.findall(r"^(?:measure|part) (\w+)", SCRIPT.read_text(), re.MULTILINE)
    assert started == listed


@pytest.mark.parametrize("options", [["--only", "launch,nothing"], ["--fast"]])
def test_the_script_refuses_what_it_does_not_know(options: list[str], tmp_path: Path) -> None:
    done = subprocess.run(["bash", SCRIPT, *options, tmp_path], capture_output=True, text=True)
    assert done.returncode == 2
    assert "launch" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.fixture
def stub(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the script with a python that only says how it was called; `paths` fails."""
    for folder in ("profiles", "bin"):
        (tmp_path / folder).mkdir()
    script = Path(shutil.copy(SCRIPT, tmp_path / "profiles"))
    python = tmp_path / "bin" / "python3"
    python.write_text('#!/bin/sh\necho "ran $*"\ncase "$*" in *"gpu paths"*) exit 3 ;; esac\n')
    python.chmod(0o755)
    path = {"PATH": f"{python.parent}:{os.environ['PATH']}"}

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", script, "--dry", *options, tmp_path / "out"]
        return subprocess.run(command, capture_output=True, text=True, env=os.environ | path)

    return run


def test_a_part_that_fails_stops_no_other(
    stub: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = stub()
    assert done.returncode == 1
    said = re.findall(r"^(\w+): (passed|failed with 3) in", done.stdout, re.MULTILINE)
    assert [part for part, _ in said] == parts_of_the_script()
    assert [part for part, how in said if how != "passed"] == ["paths"]
    checks = (tmp_path / "out" / "checks.txt").read_text()
    numbers = (tmp_path / "out" / "numbers.txt").read_text()
    assert re.findall(r"^== (\w+)", checks, re.MULTILINE) == ["paths", "options", "tests", "memory"]
    assert "profiles.gpu launch --dry --out" in numbers
    assert "profiles.tune --dry" in numbers


def test_some_parts_add_to_what_is_there_and_a_spent_budget_is_said(
    stub: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    numbers = tmp_path / "out" / "numbers.txt"
    for _ in range(2):
        assert stub("--only", "launch,step").returncode == 0
    assert re.findall(r"^== (\w+)", numbers.read_text(), re.MULTILINE) == ["launch", "step"] * 2
    done = stub("--budget", "5")
    assert done.returncode == 1
    skipped = re.findall(r"^(\w+): skipped, the budget is spent", done.stdout, re.MULTILINE)
    assert skipped == parts_of_the_script()
    assert not numbers.exists()


@pytest.mark.slow
def test_the_script_runs_dry_to_its_end(tmp_path: Path) -> None:
    """Every part, in few small files."""
    command = ["bash", SCRIPT, "--dry", "--budget", "1500", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert re.findall(r"^(\w+): passed", done.stdout, re.MULTILINE) == parts_of_the_script()
    files = list(tmp_path.iterdir())
    assert len(files) <= 8
    assert sum(file.stat().st_size for file in files) < 4e6


def test_a_kernel_that_reads_or_writes_beside_its_rows_is_found() -> None:
    layer = gqa(4, 2, 64)
    assert gpu_checks._watched(DRY, layer)["ok"]
    problem = decode_attention(
        layer, (3, 9), page_size=4, dtype=torch.float32, device=torch.device("cpu")
    )
    problem.run()
    hidden = gpu_checks._hide(problem)
    assert hidden.sum() == hidden.numel() - 12
    assert problem.run().isfinite().all()
    before = [pool.clone() for pool in problem.pools]
    page, place = hidden.nonzero()[-1].tolist()
    problem.pools[1][page, 1, place, 7] = 0.0
    changed = [
        gpu_checks._changed(a, b, hidden) for a, b in zip(before, problem.pools, strict=True)
    ]
    assert changed == [0, 1]


def test_a_case_that_fails_is_recorded_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_checks, "MEMORY", {"odd": replace(gqa(4, 2, 64), num_q_heads=3)})
    (record,) = gpu_checks.memory(DRY)
    assert not record["ok"]
    assert "supported are" in record["error"]


def test_a_peer_that_cannot_be_timed_is_named_and_ours_must_be() -> None:
    problem = decode_attention(gqa(4, 2, 64), (3,), dtype=torch.float32, device=torch.device("cpu"))
    peaks = gpu.Peaks(1e9, 1e9, "float32")
    for name, ok in (("sdpa", True), ("graphattn", False)):
        found = gpu._timed(DRY, problem, Candidate(name, None, "is wrong"), peaks)
        assert found == {"reason": "is wrong", "ok": ok}
    found = gpu._timed(DRY, problem, Candidate("graphattn", problem.run), peaks)
    assert found["ok"]
    assert found["of_copy"] == pytest.approx(found["bytes_per_s"] / 1e9)


def test_new_tiles_are_written_in_their_places_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tune.TILES.read_text()
    assert tune.rewritten(source, "sm_90", []) == source
    changes = [
        ("DECODE", (128, 16), (8, 4, 128)),
        ("DECODE", (128, 64), (1, 2, 16)),
        ("PREFILL", (256,), (32, 16, 4, 5)),
        ("LATENT", (64,), (4, 4, 32)),
    ]
    file = tmp_path / "new_tiles.py"
    file.write_text(tune.rewritten(source, "sm_90", changes))
    monkeypatch.syspath_prepend(tmp_path)
    new = importlib.import_module("new_tiles")
    for table in ("DECODE", "PREFILL", "LATENT"):
        wanted = json.loads(json.dumps(getattr(tiles, table)))
        for name, keys, values in changes:
            if name == table:
                holder = wanted["sm_90"]
                for key in keys[:-1]:
                    holder = holder[str(key)]
                holder[str(keys[-1])] = list(values)
        assert json.loads(json.dumps(getattr(new, table))) == wanted
    with pytest.raises(KeyError):
        tune.rewritten(source, "sm_90", [("DECODE", (512, 16), (4, 3, 64))])


def test_a_faster_right_tile_is_taken_a_wrong_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = tune.entries(dry=True)[0]
    current, wrong, fast, faster_but_fails = (4, 3, 64), (4, 2, 32), (8, 3, 32), (4, 2, 64)
    out = torch.ones(3)

    def measured(place: Place, entry: tune.Entry) -> tuple[torch.Tensor, float]:
        values = entry.holder("sm_90")[16]
        if values == faster_but_fails:
            raise RuntimeError("out of shared memory")
        times = {current: 1.0, wrong: 0.1, fast: 0.9}
        return out * (2 if values == wrong else 1), times.get(values, 0.98)

    monkeypatch.setattr(tune, "entries", lambda dry: [entry])
    monkeypatch.setattr(tune, "_measured", measured)
    found = tune.tune(Place(torch.device("cpu"), dry=False), "sm_90", limit=60)
    assert found == {entry: fast}
    assert entry.holder("sm_90")[16] == current
    assert tune.tune(Place(torch.device("cpu"), dry=False), "sm_90", limit=-1) == {}


def test_every_entry_of_the_tuner_is_in_a_table_of_every_architecture_that_it_tunes() -> None:
    for entry in tune.entries(dry=False):
        assert entry.keys[-1] in entry.holder("sm_90"), entry.name
        assert entry.variants(entry.holder("sm_90")[entry.keys[-1]])
