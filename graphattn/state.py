"""Slot state: the device tensors that outlive a step."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum

import torch
from torch import Tensor

from graphattn.bounds import Bounds
from graphattn.inputs import InputBlock
from graphattn.kernels import ops


class Finish(IntEnum):
    """Values of `SlotState.finish`."""

    RUNNING = 0
    STOP = 1  # emitted a stop token
    LENGTH = 2  # reached its total length
    ERROR = 3  # its logits held a NaN
    FREE = 4  # no request


@dataclass(frozen=True, slots=True)
class SlotState:
    """Indexed by slot, int32; `kernels/ops.py` has the meaning of each field."""

    generation: Tensor  # [B]
    finish: Tensor  # [B], a `Finish`
    context_len: Tensor  # [B]
    seq_len: Tensor  # [B]
    prompt_len: Tensor  # [B]
    stop_len: Tensor  # [B]
    stop_tokens: Tensor  # [B, N]
    history: Tensor  # [B, max_seq_len]
    draft_tokens: Tensor  # [B, max(K, 1)]
    draft_count: Tensor  # [B]
    page_table: Tensor  # [B, pages_per_seq]

    @staticmethod
    def allocate(bounds: Bounds, device: torch.device) -> SlotState:
        """All slots free."""
        B = bounds.max_batch

        def full(value: int, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)

        return SlotState(
            generation=full(-1, B),
            finish=full(Finish.FREE, B),
            context_len=full(0, B),
            seq_len=full(0, B),
            prompt_len=full(0, B),
            stop_len=full(0, B),
            stop_tokens=full(-1, B, bounds.max_stop_tokens),
            history=full(0, B, bounds.max_seq_len),
            draft_tokens=full(0, B, max(bounds.max_drafts, 1)),
            draft_count=full(0, B),
            page_table=full(0, B, bounds.pages_per_seq),
        )

    def admit(self, inputs: InputBlock) -> None:
        """Stage: apply the host's admissions, releases and page-table updates."""
        ops.admit(
            inputs.admit_generation,
            inputs.release,
            inputs.admit_prompt_len,
            inputs.admit_context_len,
            inputs.admit_stop_len,
            inputs.admit_stop_tokens,
            inputs.page_updates,
            self.generation,
            self.finish,
            self.context_len,
            self.seq_len,
            self.prompt_len,
            self.stop_len,
            self.stop_tokens,
            self.draft_count,
            self.page_table,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Every field by name, for verification and reports."""
        return {f.name: getattr(self, f.name) for f in fields(self)}
