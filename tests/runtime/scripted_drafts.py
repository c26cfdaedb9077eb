"""A drafter that knows the right tokens, and keeps to a script of right and wrong ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from graphattn.config import Bucket
from graphattn.draft import Drafter, DraftProgram
from graphattn.memory import StepMemory
from graphattn.models.contract import AttentionLayer, StepModel
from graphattn.state import Finish


@dataclass(frozen=True, slots=True)
class Scripted:
    """Drafts for requests whose prompts begin with different tokens; `texts` are the whole ones.

    right: k right drafts. wrong: k wrong ones. on and off: k right ones, then none, in turn.
    mixed: 0 to k drafts, right up to a place that moves.
    """

    k: int
    texts: Sequence[Sequence[int]]
    script: Literal["right", "wrong", "on and off", "mixed"]

    def resolve(self, target: StepModel) -> Scripted:
        return self

    def kv_layers(self) -> Sequence[AttentionLayer]:
        return ()

    @property
    def lookahead(self) -> int:
        return 0

    def open(self, memory: StepMemory, target: StepModel) -> Drafter:
        return _Script(self, memory)


class _Script:
    def __init__(self, scripted: Scripted, memory: StepMemory) -> None:
        self._state, self._script, self._vocab = (
            memory.state,
            scripted.script,
            memory.bounds.vocab_size,
        )
        self._right = torch.zeros(self._vocab, memory.bounds.max_seq_len, dtype=torch.int32)
        for text in scripted.texts:
            self._right[text[0], : len(text)] = torch.tensor(text, dtype=torch.int32)
        self._places = torch.arange(scripted.k)
        self._turn = torch.zeros(memory.bounds.max_batch, dtype=torch.int32)  # steps of the slot

    def program(self, bucket: Bucket) -> DraftProgram:
        return self

    def remember(self) -> None:
        pass

    def run(self, features: Mapping[str, Tensor]) -> None:
        state, k, places = self._state, len(self._places), self._places
        decodes = (state.finish == Finish.RUNNING) & (state.context_len == state.seq_len - 1)
        self._turn.copy_(torch.where(decodes, self._turn + 1, 0))
        turn, end = self._turn, self._right.shape[1]
        at = (state.seq_len[:, None] + places).clamp(max=end - 1).long()
        drafts = self._right[state.history[:, 0].long()].gather(1, at)
        wrong_from = {"wrong": turn * 0, "mixed": turn % (k + 2)}.get(self._script, turn * 0 + k)
        wrong = places >= wrong_from[:, None]
        state.draft_tokens.copy_(torch.where(wrong, (drafts + 1) % self._vocab, drafts))
        count = {"on and off": turn % 2 * k, "mixed": turn * 3 % (k + 1)}.get(
            self._script, turn * 0 + k
        )
        room = torch.minimum(state.stop_len - 1, torch.full_like(turn, end)) - state.seq_len
        count = torch.minimum(count, room).clamp(min=0)
        state.draft_count.copy_(torch.where(decodes, count, 0))

    def pools(self) -> dict[str, Tensor]:
        return {}

    def scratch(self) -> dict[str, Tensor]:
        return {}

    def lasting(self) -> dict[str, Tensor]:
        return {"turn": self._turn}

    def models(self) -> dict[str, object]:
        return {}
