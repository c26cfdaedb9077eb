"""graphattn.testing: what its assertions accept and refuse, also in a stranger's repository."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from graphattn import Graph
from graphattn.testing import (
    assert_no_host_reads,
    assert_replay_matches,
    assert_same_tokens,
    no_allocation,
    poison,
)
from tests.tiny_llama import tiny_llama

X, OUT, STATE = torch.zeros(4), torch.zeros(4), torch.zeros(4)


def write(step: int) -> None:
    X.fill_(step + 1.0)


def program() -> None:
    STATE.add_(X)
    OUT.copy_(STATE * 2)


def test_a_clean_program_has_no_host_reads_and_another_is_told_its_line() -> None:
    assert_no_host_reads(program)
    with pytest.raises(AssertionError, match=r"host read: .*X\.sum\(\)\.item\(\)"):
        assert_no_host_reads(lambda: X.sum().item())


def test_a_replay_that_relies_on_what_was_left_does_not_match() -> None:
    watch = {"out": OUT, "state": STATE}
    with Graph(program, device="cpu") as graph:
        assert_replay_matches(graph, inputs=write, watch=watch, poison=lambda: poison(OUT))
        with pytest.raises(AssertionError, match=r"step 0: .*\[0\]"):
            assert_replay_matches(graph, inputs=write, watch=watch, poison=lambda: poison(STATE))


def test_poison_of_every_kind() -> None:
    tensors = [
        torch.zeros(2, dtype=d) for d in (torch.float16, torch.int8, torch.int64, torch.bool)
    ]
    poison(*tensors)
    assert tensors[0].isnan().all()
    assert tensors[1].tolist() == [127, 127]
    assert tensors[2].tolist() == [2**30] * 2
    assert tensors[3].all()


def test_memory_that_outlives_the_block_is_named_by_its_line() -> None:
    kept: list[Tensor] = []
    with no_allocation():
        (X + 1).mul_(2)  # an intermediate
        OUT.copy_(X)
    with pytest.raises(AssertionError, match=r"16 bytes kept from .*kept\.append"), no_allocation():
        kept.append(X + 1)


def test_tokens() -> None:
    model = tiny_llama()
    assert_same_tokens(model, [1, 2], [3, 4], [3, 4])
    with pytest.raises(AssertionError, match="DIFFERENT at token 1 of 2"):
        assert_same_tokens(model, [1, 2], [3, 4], [3, 5], near_ties=True)


STRANGER = """
import torch

X = torch.zeros(3)

def test_clean(assert_no_host_reads, poison, no_allocation):
    assert_no_host_reads(lambda: X.add_(1))
    poison(X)
    with no_allocation():
        X.zero_()

def test_found(assert_no_host_reads):
    assert_no_host_reads(lambda: print(X.max().item()))

def test_on_a_fake_device(fake_cuda):
    assert torch.ones(2).device.type == "cuda"
"""


def test_in_a_repository_of_a_stranger(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["graphattn.testing"]\n')
    (tmp_path / "test_theirs.py").write_text(STRANGER)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert "1 failed, 2 passed" in run.stdout, run.stdout
    assert "test_theirs.py:13: host read: assert_no_host_reads(lambda: print(X.max().item()))" in (
        run.stdout
    )
