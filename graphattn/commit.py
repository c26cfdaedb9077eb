"""Accepting drafts: sample and match, then commit.

At each place of a row a token is drawn; a draft is accepted while it equals the token drawn
before it. Drafts are point masses, so this equals rejection sampling with its residual, and the
emitted tokens are those of plain decoding whatever the drafts were.
"""

from __future__ import annotations

from torch import Tensor

from graphattn.kernels import ops
from graphattn.metadata import StepMetadata
from graphattn.ring import OutputBlock
from graphattn.state import SlotState


def commit(
    sampled: Tensor,
    slot_of_row: Tensor,
    step: StepMetadata,
    state: SlotState,
    output: OutputBlock,
) -> None:
    """Stage: append what each row emits to its slot, end requests, fill the output block.

    `sampled` [L] int32 holds one token per logits place; see `kernels/ops.py` for the rules.
    """
    ops.commit(
        sampled,
        slot_of_row,
        step.token_count,
        step.logits_start,
        step.logits_count,
        state.generation,
        state.stop_len,
        state.stop_tokens,
        state.draft_tokens,
        state.context_len,
        state.seq_len,
        state.finish,
        state.history,
        state.draft_count,
        output.slot,
        output.generation,
        output.count,
        output.finish,
        output.context_len,
        output.tokens,
    )
