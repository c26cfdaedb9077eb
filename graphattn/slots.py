"""What a model keeps of every slot from step to step: recurrent states, counters.

A step moves a slot from its context length before the commit to the one after it, and what the
model keeps of the slot has to move along: to the state after the last token that is in the context
then. Which token that is shows only after the commit. So the model offers the states after the
last 1 + k tokens of each row, and the commit selects one: of a prefill chunk the last, of a decode
row that after its last accepted draft. Where a slot has not moved nothing is written. Nothing is
rolled back, since nothing was written before it was final.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from graphattn.bounds import Bounds
from graphattn.errors import UnsupportedModelError, wrong
from graphattn.inputs import InputBlock
from graphattn.metadata import StepMetadata
from graphattn.models.contract import SlotTensor
from graphattn.state import SlotState


class SlotMemory:
    """The tensors that a model registered, [max_batch, *shape] each.

    They have one place more than there are slots: rows that move no slot write there.
    """

    def __init__(
        self,
        specs: Mapping[str, SlotTensor],
        bounds: Bounds,
        inputs: InputBlock,
        state: SlotState,
    ) -> None:
        self.specs, self.bounds = specs, bounds
        self.inputs, self.state = inputs, state
        B, device = bounds.max_batch, state.finish.device
        self.whole = {
            name: torch.full((B + 1, *spec.shape), spec.fill, dtype=spec.dtype, device=device)
            for name, spec in specs.items()
        }
        self.places = torch.arange(bounds.max_tokens, device=device)  # constants
        self.kept = torch.arange(bounds.decode_query_len, device=device)

    def tensors(self) -> dict[str, Tensor]:
        """By name, without the place for nobody."""
        return {name: tensor[:-1] for name, tensor in self.whole.items()}


class StepSlots:
    """See `models.contract.StepSlots`."""

    def __init__(self, memory: SlotMemory, step: StepMetadata) -> None:
        T = step.input_ids.shape[0]
        R = min(memory.bounds.max_batch, T)  # rows lie in front, each with a place of its own
        inputs, in_row = memory.inputs, step.row_of_token >= 0
        self._memory = memory
        self._rows = memory.places[:R]
        self._kept: dict[str, Tensor] = {}
        self.slot_of_row = inputs.slot_of_row[:R]
        self.query_start = step.query_start[: R + 1]
        self.token_count = step.token_count[:R]
        self._seated = self.slot_of_row >= 0
        self._slot = self.slot_of_row.clamp(min=0).long()
        self.admitted = (inputs.admit_generation[self._slot] >= 0) & self._seated
        self.row = step.row_of_token.clamp(min=0).long()
        self.offset = memory.places[:T] - self.query_start[self.row]
        self.exists = (self.offset < self.token_count[self.row]) & in_row
        # [R]: tokens of each row before those whose states are kept
        self._passed_over = (self.token_count - len(memory.kept)).clamp(min=0)
        last = (self.token_count - 1).clamp(min=0)[:, None]
        place = torch.minimum(self._passed_over[:, None] + memory.kept, last)
        self.kept_places = (self.query_start[:-1, None] + place).clamp(max=T - 1)
        self._before = memory.state.context_len[self._slot]  # a copy: the commit changes it

    def start(self, name: str) -> Tensor:
        """See the contract."""
        spec = self._spec(name)
        admitted = self.admitted.view(-1, *[1] * len(spec.shape))
        # `where`: what an earlier request left may be NaN
        return torch.where(admitted, spec.fill, self._memory.whole[name][self._slot])

    def keep(self, name: str, states: Tensor) -> None:
        """See the contract."""
        spec = self._spec(name)
        shape = (len(self._rows), len(self._memory.kept), *spec.shape)
        if states.shape != shape or states.dtype != spec.dtype:
            raise wrong(
                f"keep({name!r})",
                f"{spec.dtype} {list(shape)}, rows x (1 + drafts) x the shape of the slot tensor",
                f"{states.dtype} {list(states.shape)}",
                "Pass states[step.slots.kept_places].",
            )
        self._kept[name] = states

    def tensor(self, name: str) -> Tensor:
        """See the contract."""
        self._spec(name)
        return self._memory.whole[name][:-1]

    def commit(self) -> None:
        """Stage, after the commit of tokens: let the kept states follow the context lengths."""
        if missing := sorted(self._memory.specs.keys() - self._kept.keys()):
            raise UnsupportedModelError(
                f"the model registered the slot tensors {', '.join(missing)} and its call did not "
                "keep them. Call step.slots.keep(name, states) for each; see docs/own-model.md."
            )
        moved = self._memory.state.context_len[self._slot] - self._before
        nobody = self._memory.bounds.max_batch
        target = torch.where(self._seated & (moved > 0), self._slot, nobody)
        chosen = (moved - 1 - self._passed_over).clamp(0, len(self._memory.kept) - 1).long()
        for name, states in self._kept.items():
            self._memory.whole[name].index_copy_(0, target, states[self._rows, chosen])

    def _spec(self, name: str) -> SlotTensor:
        spec = self._memory.specs.get(name)
        if spec is None:
            known = ", ".join(self._memory.specs) or "none"
            raise wrong("step.slots", f"a slot tensor of the model ({known})", name, "Register it.")
        return spec


def check_slot_tensors(specs: object) -> None:
    """Raise `UnsupportedModelError` unless `specs` maps names to `SlotTensor`s."""
    good = isinstance(specs, Mapping) and all(
        isinstance(name, str)
        and isinstance(spec, SlotTensor)
        and all(isinstance(n, int) and n > 0 for n in spec.shape)
        for name, spec in specs.items()
    )
    if not good:
        raise UnsupportedModelError(
            "model.slot_tensors: wanted a mapping from names to "
            f"graphattn.models.contract.SlotTensor, with positive sizes, got {specs!r}"
        )


def slot_bytes(specs: Mapping[str, SlotTensor]) -> int:
    """Bytes of one slot."""
    return sum(torch.Size(s.shape).numel() * s.dtype.itemsize for s in specs.values())
