"""The places before a step's that a chain of MTP modules sees again.

Module i pairs place p with token p + i + 1. At the last i places of a step that token is a draft,
or not known yet; in the next step it is known. So the chain runs over `extra` more places before
those of the step, as many as the last module looks ahead further than the first, and the target's
hidden states of these are kept from step to step. transformers does the same by cropping its cache
and running over the same places again.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from graphattn.drafting import Drafting, DraftingSlots
from graphattn.memory import StepMemory
from graphattn.metadata import StepMetadata, StepRows
from graphattn.models.mtp import MTPModule


class Overlap:
    """`extra` places before those of each row, where the slot has them. int32, by slot unless
    said."""

    def __init__(
        self, extra: int, module: MTPModule, memory: StepMemory, drafting: Drafting
    ) -> None:
        self._extra, self._memory, self._drafting = extra, memory, drafting
        B, device = memory.bounds.max_batch, memory.state.finish.device

        def zeros() -> Tensor:
            return torch.zeros(B, dtype=torch.int32, device=device)

        self._query_len = zeros()  # by row
        self._start = zeros()  # first place
        self._prompt_len = zeros()  # 0 once the slot decodes: its row is then a decode row
        self._ends = [zeros() for _ in range(extra + 1)]  # by module: end of what it can see
        self._kept = torch.zeros(
            B, extra, module.hidden_size, dtype=module.dtype, device=device
        )  # of the last places below the context length
        self._last = torch.arange(-extra, 0, dtype=torch.int32, device=device)  # a constant

    def count(self, tokens: int, rows: int) -> int:
        """See `Places`."""
        return tokens + self._extra * rows

    def begin(self, slots: DraftingSlots) -> None:
        """See `Places`."""
        inputs, state, committed = self._memory.inputs, self._memory.state, self._drafting.committed
        self._start.copy_((committed - self._extra).clamp(min=0))
        seated = inputs.query_len > 0
        self._query_len.copy_(torch.where(seated, inputs.query_len + self._extra, 0))
        self._prompt_len.copy_(torch.where(committed < state.prompt_len, state.prompt_len, 0))
        for index, end in enumerate(self._ends):
            known = torch.minimum(state.context_len, state.seq_len - (index + 1))
            end.copy_(torch.where(slots.drafts, state.context_len, known))

    def rows(self, index: int) -> StepRows:
        """See `Places`. A slot that drafts has its drafts in the history."""
        history = self._memory.state.history[:, index + 1 :]
        rows = self._drafting.step_rows(self._start, self._ends[index], history)
        return replace(rows, query_len=self._query_len, prompt_len=self._prompt_len)

    def hidden(self, step_hidden: Tensor, step: StepMetadata, slots: DraftingSlots) -> Tensor:
        """See `Places`. Keeps those of the last places for the next step."""
        slot_of_row, own = self._memory.inputs.slot_of_row, self._memory.target.shards[0].buffers
        row = step.row_of_token.clamp(min=0)
        slot = slot_of_row[row].clamp(min=0)
        place = step.positions - self._drafting.committed[slot]  # of the step; negative: kept
        T, extra = step_hidden.shape[0], self._extra
        kept = (T + (slot + 1) * extra + place).clamp(min=0)  # [B, extra] after the step's places
        source = torch.where(place < 0, kept, own.query_start[row] + place)
        every = torch.cat([step_hidden, self._kept.flatten(0, 1).to(step_hidden.dtype)])
        hidden = every[source.clamp(max=every.shape[0] - 1).long()]
        self._keep(hidden, step, slots)
        return hidden

    def _keep(self, hidden: Tensor, step: StepMetadata, slots: DraftingSlots) -> None:
        """hidden [T', H]: keep those of the last `extra` places below the new context length."""
        place = (self._memory.state.context_len - self._start)[:, None] + self._last
        source = step.query_start[slots.row][:, None] + place.clamp(min=0)
        source = source.clamp(max=hidden.shape[0] - 1).long()
        seen = slots.running[:, None, None]
        self._kept.copy_(torch.where(seen, hidden[source], self._kept))

    def scratch(self) -> dict[str, Tensor]:
        """See `Places`."""
        ends = {f"end.{i}": end for i, end in enumerate(self._ends)}
        return ends | {
            "overlap.query_len": self._query_len,
            "overlap.start": self._start,
            "overlap.prompt_len": self._prompt_len,
        }

    def lasting(self) -> dict[str, Tensor]:
        """See `Places`."""
        return {"kept": self._kept}
