"""A target that offers its hidden states, and prediction modules of the contract that know it.

The target has one windowed layer, so a token depends on no more than the last `WINDOW` ones: a
module that sees those, at the places before them, can be exactly right.
"""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor

from graphattn.models.contract import ModelStep
from graphattn.models.mtp import MTPOutput
from tests.runtime.tiny_model import TinyModel

WINDOW = 5
POISON = 60  # a token id: its keys and values are NaN


def windowful(count: int, *, seed: int, longest: int) -> list[list[int]]:
    """Random prompts longer than the window, so that a module sees as much as the target."""
    rng = random.Random(seed)
    lengths = [WINDOW + 1 + int((longest - WINDOW) * rng.random() ** 2) for _ in range(count)]
    return [[rng.randrange(POISON) for _ in range(n)] for n in lengths]


class TinyTarget(TinyModel):
    """Offers the hidden state of each place: what its head reads."""

    def __init__(self, *, poisonable: bool = False, **options: object) -> None:
        given = {"windows": (WINDOW,), "softcap": 2.0, "sinks": True} | options
        super().__init__(**given)  # type: ignore[arg-type]
        self.poisonable = poisonable
        self.position.weight.mul_(0.3)  # so that tokens depend on tokens

    def forward(self, step: ModelStep) -> Tensor:
        hidden = self.run(step, layer=0)
        step.features["hidden"] = hidden
        return self.head(hidden[step.logits_token])

    def run(self, step: ModelStep, layer: int) -> Tensor:
        """Hidden states [T, hidden], with the KV of `layer` of the step."""
        x = self.embed(step.input_ids) + self.position(step.positions)
        q, k, v = self._split(0, x)
        if self.poisonable:
            bad = torch.where(step.input_ids == POISON, float("nan"), 0.0)[:, None, None]
            k, v = k + bad, v + bad
        x = x + self.out[0](step.attend(layer, q, k, v).flatten(1))
        return F.layer_norm(x, x.shape[-1:])


def fails_at(position: Tensor) -> Tensor:
    """Five positions of eleven: one to three in a row, one to four apart."""
    return position.square() % 11 < 4


class KnowingMTP:
    """Drafts what the target will say, where hidden state, token and position fit each other.

    Every module of the chain does the target's own work for its token, in a cache of its own. The
    hidden state that it is given must be the one that announced this token, as it is wherever
    tokens were drawn greedily; where it is not, the draft is wrong on purpose. `fails`: so it is
    for tokens at the positions of `fails_at`.
    """

    def __init__(self, target: TinyTarget, depth: int = 1, *, fails: bool = False) -> None:
        self.target, self.depth, self.fails = target, depth, fails
        self.hidden_size = target.embed.embedding_dim
        self.vocab_size, self.max_seq_len = target.vocab_size, target.max_seq_len
        self.attention_layers = target.attention_layers * depth
        self.dtype, self.device = target.dtype, target.device

    def __call__(self, step: ModelStep, hidden: Tensor, index: int) -> MTPOutput:
        target = self.target
        own = target.run(step, layer=index)
        announced = target.head(hidden).argmax(-1) == step.input_ids
        if self.fails:
            announced &= ~fails_at(step.positions + 1)
        logits = target.head(own)
        logits = torch.where(announced[:, None], logits, logits.roll(1, -1))
        return MTPOutput(logits[step.logits_token], own)
