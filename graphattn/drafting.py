"""What drafters that are models share: which slots draft, and one more token for each of them.

Every pass derives its metadata from the committed lengths. Drafts stand in the history from
`seq_len` on, where the next pass reads them and the next commit writes the true tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from graphattn.kernels import ops
from graphattn.memory import StepMemory
from graphattn.metadata import StepRows
from graphattn.state import Finish


@dataclass(frozen=True, slots=True)
class DraftingSlots:
    """The slots that draft in a step: running after it, their prompt behind them. By slot."""

    drafts: Tensor  # [B] bool
    running: Tensor  # [B] bool: they, and those of which a part of the prompt was seen
    row: Tensor  # [B] int64: its row; 0 where it has none


class Drafting:
    """Memory of the passes of one drafter, and their common parts. int32, by slot unless said."""

    def __init__(self, k: int, memory: StepMemory) -> None:
        self.k, self._memory = k, memory
        B, device = memory.bounds.max_batch, memory.state.finish.device

        def zeros() -> Tensor:
            return torch.zeros(B, dtype=torch.int32, device=device)

        self.nothing = zeros()  # a constant
        self.committed = zeros()  # context length before the commit
        self._query_len = zeros()  # by row
        self._context_len, self._seq_len, self._finish = zeros(), zeros(), zeros()
        self._tokens = zeros()  # by row: what the pass drafted
        self._slots = torch.arange(B, dtype=torch.int32, device=device)  # a constant

    def remember(self) -> None:
        """Before the commit: keep what it changes."""
        self.committed.copy_(self._memory.state.context_len)

    def begin(self, rows: int) -> DraftingSlots:
        """After the commit, in a step of at most `rows` rows."""
        state, slot_of_row = self._memory.state, self._memory.inputs.slot_of_row
        row_of_slot = slot_of_row[:rows] == self._slots[:, None]  # [B, rows]
        seated = row_of_slot.any(1)
        running = seated & (state.finish == Finish.RUNNING)
        drafts = running & (state.context_len >= state.prompt_len)
        self._query_len.copy_(slot_of_row >= 0)
        self._finish.copy_(torch.where(drafts, Finish.RUNNING, Finish.FREE))
        return DraftingSlots(drafts, running, row_of_slot.int().argmax(1))

    def step_rows(self, context_len: Tensor, seq_len: Tensor, history: Tensor) -> StepRows:
        """Rows as the host sent them, over [context_len, seq_len) of each slot."""
        return replace(
            StepRows.of(self._memory.inputs, self._memory.state),
            context_len=context_len,
            seq_len=seq_len,
            history=history,
            draft_count=self.nothing,
        )

    def single_rows(self, history: Tensor) -> StepRows:
        """Rows of one place, of the slots that draft; `move` says where it is."""
        return replace(
            self.step_rows(self._context_len, self._seq_len, history),
            query_len=self._query_len,
            prompt_len=self.nothing,
            finish=self._finish,
        )

    def move(self, offset: int) -> None:
        """Let the place of `single_rows` be `offset` after the last committed token."""
        seq_len = self._memory.state.seq_len
        self._context_len.copy_(seq_len + (offset - 1))
        self._seq_len.copy_(seq_len + offset)
        self._memory.epoch.advance()

    def keep(self, place: int, logits: Tensor, slots: DraftingSlots) -> None:
        """Draft number `place` of each slot is the best of logits [rows, V] of its row.

        The drafts of all ranks are those of rank 0.
        """
        state, end = self._memory.state, self._memory.bounds.max_seq_len
        tokens = self._tokens[: logits.shape[0]]
        ops.greedy(logits, tokens)
        if (group := self._memory.group) is not None:
            group.broadcast([tokens])
        drafted = tokens.clamp(min=0)[slots.row]  # by slot; a NaN is just a bad guess
        column = state.draft_tokens[:, place]
        column.copy_(torch.where(slots.drafts, drafted, column))
        at = (state.seq_len + place).clamp(max=end - 1).long()[:, None]
        fits = slots.drafts & (state.seq_len + place < end)
        kept = torch.where(fits[:, None], drafted[:, None], state.history.gather(1, at))
        state.history.scatter_(1, at, kept)

    def finish(self, slots: DraftingSlots) -> None:
        """Set the number of drafts: k, or what the request's end and max_seq_len leave."""
        state, end = self._memory.state, self._memory.bounds.max_seq_len
        room = torch.minimum(state.stop_len - 1, torch.full_like(state.stop_len, end))
        count = (room - state.seq_len).clamp(0, self.k)
        state.draft_count.copy_(torch.where(slots.drafts, count, state.draft_count))

    def scratch(self) -> dict[str, Tensor]:
        """What every step rewrites, by name."""
        return {
            "committed": self.committed,
            "query_len": self._query_len,
            "context_len": self._context_len,
            "seq_len": self._seq_len,
            "finish": self._finish,
            "tokens": self._tokens,
        }
