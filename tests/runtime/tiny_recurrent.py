"""A small hybrid decoder: attention, a short convolution, a gated linear recurrence, a counter."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graphattn.models.contract import ModelStep, SlotTensor, StepSlots
from tests.runtime.tiny_model import TinyModel, dense_attention

PAST = 2  # inputs that the convolution looks back
FIRST_COUNT, FIRST_STATE = 3, 0.5  # what a request starts from


class TinyRecurrent(TinyModel):
    """`TinyModel` with a recurrent layer before each attention layer.

    By layer it keeps the last `PAST` inputs of the convolution, the latest first, and the state of
    the recurrence; besides, how many even tokens it has seen, which chooses an embedding.
    """

    def __init__(self, *, windows: tuple[int, ...] = (0, 5), **options: Any) -> None:
        super().__init__(windows=windows, **options)
        hidden, layers = self.embed.embedding_dim, len(windows)
        self.taps = torch.randn(layers, PAST + 1, hidden) * 0.7
        self.gates = torch.randn(layers, 2 * hidden, hidden) * 0.4
        self.counted = torch.randn(7, hidden)
        self.slot_tensors = {"even": SlotTensor((), torch.int32, fill=FIRST_COUNT)}
        for i in range(layers):
            self.slot_tensors[f"past.{i}"] = SlotTensor((PAST, hidden))
            self.slot_tensors[f"state.{i}"] = SlotTensor((hidden,), fill=FIRST_STATE)

    def forward(self, step: ModelStep) -> Tensor:
        x = self.embed(step.input_ids) + self.position(step.positions)
        x = x + self.counted[self._count(step) % 7]
        for layer in range(len(self.qkv)):
            x = x + self._recurrent(layer, x, step.slots)
            q, k, v = self._split(layer, x)
            x = x + self.out[layer](step.attend(layer, q, k, v).flatten(1))
        return self.head(F.layer_norm(x[step.logits_token], x.shape[-1:]))

    def _count(self, step: ModelStep) -> Tensor:
        """[T]: even tokens of the slot, up to and with each place."""
        slots, even = step.slots, (step.input_ids % 2 == 0).int()
        seen = scan(torch.ones_like(even), even, slots.start("even"), slots)
        slots.keep("even", seen[slots.kept_places])
        return seen

    def _recurrent(self, layer: int, x: Tensor, slots: StepSlots) -> Tensor:
        """x [T, hidden] -> [T, hidden]"""
        recent, past = [x], slots.start(f"past.{layer}")
        for back in range(1, PAST + 1):
            kept = past[slots.row, (back - 1 - slots.offset).clamp(0, PAST - 1)]
            in_step = (slots.offset >= back)[:, None]
            recent.append(torch.where(in_step, x.roll(back, 0), kept))
        inputs = torch.stack(recent, 1)  # [T, 1 + PAST, hidden]
        slots.keep(f"past.{layer}", inputs[:, :PAST][slots.kept_places])
        a, b = self._gated(layer, (inputs * self.taps[layer]).sum(1))
        state = scan(a, b, slots.start(f"state.{layer}"), slots)
        slots.keep(f"state.{layer}", state[slots.kept_places])
        return state

    def _gated(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """The recurrence is state = a * state + b."""
        gate, value = F.linear(F.layer_norm(x, x.shape[-1:]), self.gates[layer]).chunk(2, -1)
        forget = gate.sigmoid()
        return forget, (1 - forget) * value

    def dense_logits(self, token_ids: list[int]) -> Tensor:
        """Token by token through the recurrences, without scan, slots or batch."""
        n, count = len(token_ids), FIRST_COUNT
        x = self.embed(torch.tensor(token_ids)) + self.position.weight[:n]
        counts = []
        for token in token_ids:
            count += token % 2 == 0
            counts.append(count)
        x = x + self.counted[torch.tensor(counts) % 7]
        for layer, spec in enumerate(self.attention_layers):
            past = [torch.zeros(x.shape[1])] * PAST
            state, states = torch.full((x.shape[1],), FIRST_STATE), []
            for row in x:
                inputs = [row, *past]
                mixed = sum(t * i for t, i in zip(self.taps[layer], inputs, strict=True))
                a, b = self._gated(layer, mixed)
                state, past = a * state + b, inputs[:PAST]
                states.append(state)
            x = x + torch.stack(states)
            q, k, v = self._split(layer, x)
            x = x + self.out[layer](dense_attention(q, k, v, spec).flatten(1))
        return self.head(F.layer_norm(x, x.shape[-1:]))


def scan(a: Tensor, b: Tensor, start: Tensor, slots: StepSlots) -> Tensor:
    """state = a * state + b along every row: a, b [T, ...], start [R, ...] -> states [T, ...].

    In steps of doubled length; `where` keeps rows apart.
    """

    def over(condition: Tensor, yes: Tensor, no: Tensor) -> Tensor:
        return torch.where(condition.view(-1, *[1] * (yes.dim() - 1)), yes, no)

    b = over(slots.offset == 0, a * start[slots.row] + b, b)
    hop = 1
    while hop < len(b):
        in_row = slots.offset >= hop
        b, a = over(in_row, a * b.roll(hop, 0) + b, b), over(in_row, a * a.roll(hop, 0), a)
        hop *= 2
    return b
