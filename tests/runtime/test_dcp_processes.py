"""A cache over real processes (gloo): parity, disagreement, late and dead ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def launch(ranks: int, scenario: str) -> str:
    """Run the worker as users do; its output once every rank has ended."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--standalone", "-m", "tests.runtime.dcp_worker", scenario]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("ranks", [2, 4])
def test_tokens_equal_recomputation(ranks: int) -> None:
    assert launch(ranks, "parity").count("equal") == 4


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_query_heads_sharded_over_the_group(ranks: int) -> None:
    assert launch(ranks, "sharded").count("equal") == 3


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_drafts_and_sampling_change_no_token(ranks: int) -> None:
    assert launch(ranks, "drafts").count("equal") == 3


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_loop_of_ones_own(ranks: int) -> None:
    assert launch(ranks, "own_loop").count("equal") == ranks


def test_ranks_may_enter_capture_seconds_apart() -> None:
    assert "equal" in launch(2, "late")


def test_ranks_that_were_captured_differently_say_in_what() -> None:
    out = launch(2, "disagree")
    for rank, other in ((0, 1), (1, 0)):
        assert f"rank {rank}: max_tokens: wanted the same on every rank" in out
        assert f"on rank {other}" in out


@pytest.mark.parametrize("scenario", ["dead", "stalled"])
def test_a_lost_rank_ends_the_others_with_an_error_that_names_it(scenario: str) -> None:
    lines = launch(3, scenario).splitlines()
    for rank in (0, 1):
        (line,) = [x for x in lines if x.startswith(f"rank {rank}: step 3")]
        assert "rank 2" in line
