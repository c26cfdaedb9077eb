"""`greedy` against a comparison loop."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from graphattn.kernels import ops
from graphattn.kernels.greedy import BLOCK
from graphattn.kernels.greedy import greedy as greedy_triton
from graphattn.kernels.greedy_ref import greedy_ref

Greedy = Callable[[Tensor, Tensor], None]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TRITON_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # cpu: the interpreter


def select(greedy: Greedy, logits: Tensor, device: str = "cpu") -> list[int]:
    sampled = torch.full((len(logits),), 2**31 - 1, dtype=torch.int32, device=device)
    greedy(logits.to(device), sampled)
    return list(sampled.tolist())


def run_cpu(logits: Tensor) -> list[int]:
    return select(ops.greedy, logits)


def run_triton(logits: Tensor) -> list[int]:
    return select(greedy_triton, logits, TRITON_DEVICE)


each_implementation = pytest.mark.parametrize("run", [run_cpu, run_triton], ids=["cpu", "triton"])
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
Run = Callable[[Tensor], list[int]]


@each_implementation
@each_dtype
@pytest.mark.parametrize("vocab", [1, 33, BLOCK, BLOCK + 1, 9_999])
def test_equals_the_comparison_loop(run: Run, dtype: torch.dtype, vocab: int) -> None:
    """Few distinct values, so that the largest is tied within and across blocks."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randint(-9, 3, (5, vocab), generator=generator).to(dtype) / 3
    assert run(logits) == select(greedy_ref, logits)


@each_implementation
def test_ties_go_to_the_lowest_id(run: Run) -> None:
    """Also between blocks, where one lane meets the same value again."""
    logits = torch.zeros(3, 2 * BLOCK + 9)
    logits[1, [7, 8, 7 + BLOCK, 7 + 2 * BLOCK]] = 1.0
    logits[2, [BLOCK - 1, 2 * BLOCK]] = 1.0
    assert run(logits) == [0, 7, BLOCK - 1]


@each_implementation
@each_dtype
def test_neighbours_in_value_are_told_apart(run: Run, dtype: torch.dtype) -> None:
    """Half formats are compared by value, also below zero."""
    for largest in (3.0, -3.0):
        value = torch.tensor(largest, dtype=dtype)
        below = torch.nextafter(value, torch.tensor(-math.inf, dtype=dtype))
        logits = below.repeat(2, 301)
        logits[0, 300] = logits[1, 7] = value
        assert run(logits) == [300, 7]


@each_implementation
@each_dtype
def test_no_id_from_a_row_without_a_largest(run: Run, dtype: torch.dtype) -> None:
    """The argmax of NaN logits was an id out of range."""
    logits = torch.zeros(6, 5_001).to(dtype)
    logits[0, 5_000] = math.nan
    logits[1] = math.nan
    logits[2] = -math.inf
    logits[3] = -math.inf
    logits[3, 4_999] = torch.finfo(dtype).min
    logits[4, 77] = math.inf
    logits[5, 3] = math.inf
    logits[5, 4_998] = math.nan
    assert run(logits) == [-1, -1, -1, 4_999, 77, -1]


@each_implementation
def test_rows_may_be_strided(run: Run) -> None:
    """The pad of a wider row is not read: it is NaN."""
    wide = torch.full((3, 150), math.nan)
    wide[:, :101] = torch.arange(303, dtype=torch.float32).view(3, 101) % 97
    assert run(wide[:, :101]) == select(greedy_ref, wide[:, :101])


def test_scattered_logits_are_refused() -> None:
    with pytest.raises(ValueError, match="logits: wanted a contiguous last dimension"):
        run_triton(torch.zeros(4, 3).T)


@pytest.mark.gpu
@each_dtype
def test_op_on_cuda(dtype: torch.dtype) -> None:
    logits = torch.randn(64, 256_001, device="cuda").to(dtype)
    expected = logits.cpu().float().numpy().argmax(1).tolist()
    assert select(ops.greedy, logits, "cuda") == expected
