"""A call of `sample`: what a request asks for, per slot, and the places of each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphattn.kernels.ops import IN_PROMPT

Sample = Callable[..., None]
UNTOUCHED = 2**31 - 1


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
