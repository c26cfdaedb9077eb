"""Choosing tokens: one sampled token per logits place, from the request's own randomness."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from graphattn.bounds import Bounds
from graphattn.inputs import InputBlock
from graphattn.kernels import ops
from graphattn.metadata import StepMetadata
from graphattn.ring import OutputBlock
from graphattn.state import SlotState


@dataclass(frozen=True, slots=True)
class Sampler:
    """What sampling keeps and writes. L logits places, V vocabulary."""

    occurrences: Tensor  # [B, V] int32, by slot: emissions of each token; see `ops.count_tokens`
    sampled: Tensor  # [L] int32
    logprob: Tensor  # [L] fp32
    place: Tensor  # [1 + K] int32: 0, 1, ... K
    nobody: Tensor  # [B] int32, -1: no slot is admitted, no row emits
    nothing: Tensor  # [B] int32, 0

    @staticmethod
    def allocate(bounds: Bounds, device: torch.device) -> Sampler:
        """Sized by the largest step."""
        B, L = bounds.max_batch, bounds.logits_places(bounds.max_tokens)

        def full(value: int, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)

        return Sampler(
            occurrences=full(0, B, bounds.vocab_size),
            sampled=full(0, L),
            logprob=torch.zeros(L, dtype=torch.float32, device=device),
            place=torch.arange(bounds.decode_query_len, dtype=torch.int32, device=device),
            nobody=full(-1, B),
            nothing=full(0, B),
        )

    def admit(self, inputs: InputBlock, state: SlotState, output: OutputBlock) -> None:
        """Stage: count the tokens of admitted slots."""
        ops.count_tokens(
            inputs.admit_generation,
            inputs.admit_prompt_len,
            inputs.admit_given_len,
            state.history,
            self.nobody,
            self.nothing,
            output.tokens,
            self.occurrences,
        )

    def draw(
        self, logits: Tensor, inputs: InputBlock, step: StepMetadata, state: SlotState
    ) -> Tensor:
        """Stage: a token for each place of logits [L, V]; returns them, [L] int32."""
        sampled = self.sampled[: logits.shape[0]]
        ops.sample(
            logits,
            inputs.slot_of_row,
            step.logits_start,
            step.logits_count,
            state.seq_len,
            state.draft_tokens,
            self.occurrences,
            inputs.temperature,
            inputs.top_k,
            inputs.top_p,
            inputs.repetition_penalty,
            inputs.presence_penalty,
            inputs.frequency_penalty,
            inputs.seed,
            sampled,
            self.logprob[: logits.shape[0]],
        )
        return sampled

    def publish(
        self, inputs: InputBlock, step: StepMetadata, state: SlotState, output: OutputBlock
    ) -> None:
        """Stage, after the commit: count what was emitted, publish its log-probabilities."""
        ops.count_tokens(
            self.nobody,
            inputs.admit_prompt_len,
            inputs.admit_given_len,
            state.history,
            output.slot,
            output.count,
            output.tokens,
            self.occurrences,
        )
        last = step.logits_token.shape[0] - 1
        index = (step.logits_start[:-1, None] + self.place).clamp(max=last)
        output.logprobs.copy_(self.logprob[index])
        output.logits_count.copy_(step.logits_count)

    def tensors(self) -> dict[str, Tensor]:
        """Every field by name, for verification and reports."""
        return {f.name: getattr(self, f.name) for f in fields(self)}
