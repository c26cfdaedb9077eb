"""A model that is not from transformers, served by graphattn: a random byte-level decoder.

    python examples/own_model.py

What the runtime asks for is `graphattn.models.contract.StepModel`: seven attributes, and a call
that maps a step to logits. Inside the call, `step.attend` is the only way to see other tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphattn
from graphattn.models.contract import AttentionLayer, ModelStep

HIDDEN, Q_HEADS, KV_HEADS, HEAD_DIM = 96, 6, 2, 16


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.qkv = nn.Linear(HIDDEN, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(Q_HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], step: ModelStep) -> Tensor:
        """x [T, HIDDEN] -> [T, HIDDEN]"""
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = qkv.split((Q_HEADS, KV_HEADS, KV_HEADS), dim=1)
        attended = step.attend(self.layer, rotate(q, rotation), rotate(k, rotation), v)
        x = x + self.out(attended.flatten(1))
        gate, up = self.up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class ByteModel(nn.Module):
    """Meets `StepModel`. Every size is fixed here, so nothing in a step depends on data."""

    vocab_size, max_seq_len, eos_token_ids = 256, 512, (0,)
    dtype = torch.float32

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(self.vocab_size, HIDDEN)
        self.blocks = nn.ModuleList(Block(i) for i in range(num_layers))
        self.head = nn.Linear(HIDDEN, self.vocab_size, bias=False)
        self.attention_layers = num_layers * (
            AttentionLayer(Q_HEADS, KV_HEADS, HEAD_DIM, scale=HEAD_DIM**-0.5),
        )
        # A buffer, not made in the call: a captured step makes no tensor from Python data.
        frequency = 10_000 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        self.register_buffer("frequency", frequency)

    @property
    def device(self) -> torch.device:
        """Where weights, KV pages and the step live."""
        return self.embed.weight.device

    def forward(self, step: ModelStep) -> Tensor:
        """Logits [L, vocab_size] of the places `step.logits_token`."""
        angle = step.positions.unsqueeze(1) * self.frequency
        rotation = (angle.cos().unsqueeze(1), angle.sin().unsqueeze(1))
        x = self.embed(step.input_ids)
        for index, block in enumerate(self.blocks):
            with step.layer(index):  # a name for profilers
                x = block(x, rotation, step)
        return self.head(x[step.logits_token])


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions: x [T, heads, HEAD_DIM], rotation two of [T, 1, HEAD_DIM / 2]."""
    (a, b), (cos, sin) = x.chunk(2, dim=-1), rotation
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def main() -> None:
    """Serve three prompts at once."""
    torch.manual_seed(0)
    prompts = [list(text.encode()) for text in ("Hello", "A captured step", "x")]
    with graphattn.capture(ByteModel().eval(), max_batch=4, max_tokens=64) as engine:
        for completion in engine.generate(prompts, max_new_tokens=16):
            print(bytes(completion.prompt), completion.token_ids, completion.finish_reason.value)
        print(engine.report())


if __name__ == "__main__":
    main()
