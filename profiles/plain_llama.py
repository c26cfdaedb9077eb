"""A Llama-shaped model of plain torch, with random weights: benchmarks without transformers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphattn.models.contract import AttentionLayer, ModelStep


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model, and the attention options of its layers, which repeat in order."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 96
    vocab: int = 251
    windows: tuple[int, ...] = (0,)
    softcap: float = 0.0
    sinks: bool = False
    value_dim: int = 0  # > 0: latents of head_dim values in place of K and V; kv_heads = 1


# Of the 8-billion-parameter Llama 3.
LLAMA_8B = Shape(32, 4096, 32, 8, 128, 14336, 128_256)
# The latent attention of DeepSeek-V3, with all heads on one rank.
DEEPSEEK_V3 = Shape(1, 1024, 128, 1, 576, 1024, 1024, value_dim=512)


class Layer(nn.Module):
    """Norm, attention, norm, gated MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.norm_1, self.norm_2 = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        heads = shape.heads + (1 if shape.value_dim else 2 * shape.kv_heads)
        out_dim = shape.value_dim or shape.head_dim
        self.qkv = nn.Linear(shape.hidden, heads * shape.head_dim, bias=False)
        self.o = nn.Linear(shape.heads * out_dim, shape.hidden, bias=False)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.intermediate, bias=False)
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor, index: int, step: ModelStep, cos: Tensor, sin: Tensor) -> Tensor:
        """x [T, hidden]; cos and sin [T, 1, head_dim]."""
        heads = self.qkv(self.norm_1(x)).view(x.shape[0], -1, self.shape.head_dim)
        x = x + self.o(self.attend(heads, index, step, cos, sin).flatten(1))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)

    def attend(
        self, heads: Tensor, index: int, step: ModelStep, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Attention of the heads [T, q and k and v, or q and latent, head_dim]."""
        shape = self.shape
        if shape.value_dim:
            q, latent = rotate(heads, cos, sin).split([shape.heads, 1], dim=1)
            return step.attend_latent(index, q, latent.squeeze(1))
        q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        return step.attend(index, rotate(q, cos, sin), rotate(k, cos, sin), v)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [T, heads, head_dim]."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class PlainLlama(nn.Module):
    """Meets `graphattn.models.contract.StepModel`."""

    eos_token_ids: tuple[int, ...] = ()
    cos: Tensor  # [max_seq_len, 1, head_dim]
    sin: Tensor
    sinks: Tensor | None  # [heads]

    def __init__(self, shape: Shape, max_seq_len: int) -> None:
        super().__init__()
        self.shape = shape
        self.vocab_size, self.max_seq_len = shape.vocab, max_seq_len
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        half = torch.arange(0, shape.head_dim, 2) / shape.head_dim
        angles = torch.arange(max_seq_len)[:, None] / 10_000**half
        self.register_buffer("cos", angles.cos().repeat(1, 2)[:, None])
        self.register_buffer("sin", angles.sin().repeat(1, 2)[:, None])
        sinks = torch.linspace(-1, 1, shape.heads) if shape.sinks else None
        self.register_buffer("sinks", sinks)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.embed.weight.dtype

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return self.embed.weight.device

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """One per block."""
        shape = self.shape
        return tuple(
            AttentionLayer(
                shape.heads,
                shape.kv_heads,
                shape.head_dim,
                scale=shape.head_dim**-0.5,
                softcap=shape.softcap,
                window=shape.windows[i % len(shape.windows)],
                sinks=None if self.sinks is None else self.sinks.float(),
                value_dim=shape.value_dim,
            )
            for i in range(shape.layers)
        )

    def forward(self, step: ModelStep) -> Tensor:
        """Logits of the places that need them."""
        x = self.embed(step.input_ids)
        cos, sin = self.cos[step.positions], self.sin[step.positions]
        for index, block in enumerate(self.blocks):
            with step.layer(index):
                x = block(x, index, step, cos, sin)
        return self.head(self.norm(x[step.logits_token]))


def plain_llama(
    shape: Shape, *, max_seq_len: int, device: torch.device, dtype: torch.dtype
) -> PlainLlama:
    """A model with seeded random weights, made on `device`."""
    torch.manual_seed(0)
    with device:
        return PlainLlama(shape, max_seq_len).to(dtype).eval()
