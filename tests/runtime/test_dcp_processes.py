"""A cache over real processes (gloo): parity, disagreement, late and dead ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def launch(ranks: int, *scenarios: str) -> str:
    """Run the worker as users do; its output once every rank has ended.

    Several scenarios of one launch run one after the other: starting processes takes longest.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--standalone", "-m", "tests.runtime.dcp_worker", *scenarios]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_no_layout_lateness_or_draft_changes_a_token(ranks: int) -> None:
    """Nor do query heads that are sharded over the group."""
    out = launch(ranks, "parity", "sharded", "drafts", "late", "disagree")
    for scenario, times in (("parity", 4), ("sharded", 3), ("drafts", 3), ("late", 1)):
        assert out.count(f"{scenario}: equal") == times, out
    for rank in range(ranks):
        assert f"rank {rank}: max_tokens: wanted the same on every rank" in out
        assert f"on rank {(rank + 1) % 2}" in out


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_loop_of_ones_own(ranks: int) -> None:
    assert launch(ranks, "own_loop").count("own_loop: equal") == ranks


@pytest.mark.parametrize("scenario", ["dead", "stalled"])
def test_a_lost_rank_ends_the_others_with_an_error_that_names_it(scenario: str) -> None:
    lines = launch(3, scenario).splitlines()
    for rank in (0, 1):
        (line,) = [x for x in lines if x.startswith(f"rank {rank}: step 3")]
        assert "rank 2" in line
