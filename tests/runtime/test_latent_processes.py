"""Latent attention over real processes (gloo)."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.runtime.test_dcp_processes import ROOT


def test_latents_over_two_processes() -> None:
    """Query heads sharded over the ranks of a model of one's own; a DeepSeek on every rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", "-m", "tests.runtime.latent_worker", "sharded", "deepseek"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("equal heads") == 2
    assert done.stdout.count("equal deepseek") == 1
