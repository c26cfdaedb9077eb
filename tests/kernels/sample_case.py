"""A call of `sample`: what a request asks for, per slot, and the places of each row; and the
implementations under test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import graphattn.kernels.sample as sample_triton
from graphattn.kernels import ops
from graphattn.kernels.ops import IN_PROMPT

Sample = Callable[..., None]
UNTOUCHED = 2**31 - 1
TRITON_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # cpu: the interpreter

# Noise in fp32 against float64. E = -log(1 - w) is at least w * (1 - 2**-25), so a few roundings
# are a relative error of 2**-21 at most, and as much of an absolute one of g = -log(E); |g| < 32,
# so each of up to four roundings of g, x + g and their parts adds half an ulp of 32.
GUMBEL_ERROR = 2.0**-21 + 2 * 2.0**-20


@dataclass(frozen=True)
class Request:
    """Sampling options of a slot and the state that sampling reads."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    seed: tuple[int, int] = (7, -9)
    seq_len: int = 100
    drafts: tuple[int, ...] = ()
    prompt: tuple[int, ...] = ()
    emitted: tuple[int, ...] = ()


@dataclass(frozen=True)
class Result:
    """What `sample` wrote."""

    sampled: list[int]  # [L]
    logprob: list[float]  # [L]


@dataclass(frozen=True)
class Case:
    """Rows over slots: row r has slot_of_row[r] and counts[r] of reserved[r] logits places."""

    logits: Tensor  # [L, V]
    requests: Sequence[Request]  # by slot
    slot_of_row: Sequence[int]
    counts: Sequence[int]
    reserved: Sequence[int]

    def arguments(self) -> list[Tensor]:
        """The tensors of `sample`, outputs full of rubbish."""
        requests = self.requests
        places, vocab = self.logits.shape
        most = max(1, *(len(request.drafts) for request in requests))
        drafts = torch.full((len(requests), most), UNTOUCHED, dtype=torch.int32)
        occurrences = torch.zeros(len(requests), vocab, dtype=torch.int32)
        for slot, request in enumerate(requests):
            drafts[slot, : len(request.drafts)] = torch.tensor(request.drafts)
            for token in request.emitted:
                occurrences[slot, token] += 1
            for token in set(request.prompt):
                occurrences[slot, token] += IN_PROMPT
        starts = [sum(self.reserved[:row]) for row in range(len(self.reserved) + 1)]

        def floats(name: str) -> Tensor:
            return torch.tensor([getattr(request, name) for request in requests])

        def ints(values: Sequence[int] | Sequence[tuple[int, int]]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32)

        return [
            self.logits,
            ints(self.slot_of_row),
            ints(starts),
            ints(self.counts),
            ints([request.seq_len for request in requests]),
            drafts,
            occurrences,
            floats("temperature"),
            ints([request.top_k for request in requests]),
            floats("top_p"),
            floats("repetition"),
            floats("presence"),
            floats("frequency"),
            ints([request.seed for request in requests]),
            torch.full((places,), UNTOUCHED, dtype=torch.int32),
            torch.full((places,), 123.0),
        ]

    def run(self, sample: Sample, device: str = "cpu") -> Result:
        """Call it; what it reads of rows and slots stays as it was."""
        before = [tensor.to(device) for tensor in self.arguments()]
        after = [tensor.clone() if i else tensor for i, tensor in enumerate(before)]
        sample(*after)
        for was, now in zip(before[1:-2], after[1:-2], strict=True):
            assert torch.equal(was, now)
        return Result(after[-2].tolist(), after[-1].tolist())


def one_row_each(logits: Tensor, requests: Sequence[Request]) -> Case:
    """Request i decodes in row i with logits[i], and has no drafts."""
    rows = range(len(requests))
    return Case(logits, requests, list(rows), [1 for _ in rows], [1 for _ in rows])


Run = Callable[[Case], Result]


def run_cpu(case: Case) -> Result:
    """Through the op."""
    return case.run(ops.sample)


def run_triton(case: Case) -> Result:
    """In blocks so small that small vocabularies take several iterations too."""
    with patch.object(sample_triton, "BLOCK", 64):
        return case.run(sample_triton.sample, TRITON_DEVICE)


each_implementation = pytest.mark.parametrize("run", [run_cpu, run_triton], ids=["cpu", "triton"])


def random_logits(shape: tuple[int, int], seed: int, spread: float = 2.0) -> Tensor:
    """Normal, with that standard deviation."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread
