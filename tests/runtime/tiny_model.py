"""A small random decoder that meets the step contract, and a naive way to run it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphattn.models.contract import AttentionLayer, ModelStep


class TinyModel(nn.Module):
    """Pre-norm decoder with learned positions; windows, soft-cap and sinks per layer.

    `dense_logits` recomputes everything for one sequence without cache, batch or padding.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 61,
        max_seq_len: int = 96,
        hidden: int = 24,
        num_q_heads: int = 6,
        num_kv_heads: int = 2,
        head_dim: int = 8,
        windows: tuple[int, ...] = (0, 5),
        softcap: float = 0.0,
        sinks: bool = False,
        eos_token_ids: tuple[int, ...] = (),
        seed: int = 0,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.vocab_size, self.max_seq_len = vocab_size, max_seq_len
        self.eos_token_ids = eos_token_ids
        self.heads = (num_q_heads, num_kv_heads, head_dim)
        width = (num_q_heads + 2 * num_kv_heads) * head_dim
        self.embed = nn.Embedding(vocab_size, hidden)
        self.position = nn.Embedding(max_seq_len, hidden)
        self.qkv = nn.ModuleList(nn.Linear(hidden, width) for _ in windows)
        self.out = nn.ModuleList(nn.Linear(num_q_heads * head_dim, hidden) for _ in windows)
        self.head = nn.Linear(hidden, vocab_size, bias=False)
        self.sinks = nn.Parameter(torch.randn(len(windows), num_q_heads)) if sinks else None
        for parameter in self.parameters():
            parameter.requires_grad_(False)
            parameter.mul_(2.0)  # peaked enough that greedy tokens vary with the context
        self.attention_layers = tuple(
            AttentionLayer(
                num_q_heads,
                num_kv_heads,
                head_dim,
                scale=1 / math.sqrt(head_dim),
                softcap=softcap,
                window=window,
                sinks=None if self.sinks is None else self.sinks[i],
            )
            for i, window in enumerate(windows)
        )
        self.eval()

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    def _split(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hq, hkv, d = self.heads
        normed = F.layer_norm(x, x.shape[-1:])
        qkv = self.qkv[layer](normed).view(-1, hq + 2 * hkv, d)
        return qkv[:, :hq], qkv[:, hq : hq + hkv], qkv[:, hq + hkv :]

    def forward(self, step: ModelStep) -> Tensor:
        x = self.embed(step.input_ids) + self.position(step.positions)
        for layer in range(len(self.qkv)):
            q, k, v = self._split(layer, x)
            x = x + self.out[layer](step.attend(layer, q, k, v).flatten(1))
        return self.head(F.layer_norm(x[step.logits_token], x.shape[-1:]))

    def dense_logits(self, token_ids: list[int]) -> Tensor:
        """Logits [len, V] of every position of one sequence."""
        n = len(token_ids)
        x = self.embed(torch.tensor(token_ids, device=self.device)) + self.position.weight[:n]
        for layer, spec in enumerate(self.attention_layers):
            q, k, v = self._split(layer, x)
            x = x + self.out[layer](dense_attention(q, k, v, spec).flatten(1))
        return self.head(F.layer_norm(x, x.shape[-1:]))

    def generate(
        self, prompt: list[int], max_new_tokens: int, stop: tuple[int, ...] = ()
    ) -> list[int]:
        """Greedy tokens, recomputed from scratch for each."""
        tokens = list(prompt)
        while len(tokens) < min(len(prompt) + max_new_tokens, self.max_seq_len):
            tokens.append(int(self.dense_logits(tokens)[-1].argmax()))
            if tokens[-1] in (*stop, *self.eos_token_ids):
                break
        return tokens[len(prompt) :]


def dense_attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionLayer) -> Tensor:
    n, group = len(q), spec.num_q_heads // spec.num_kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    places = torch.arange(n, device=q.device)
    distance = places[:, None] - places
    hidden = (distance < 0) | ((distance >= spec.window) if spec.window else False)
    scores = scores.masked_fill(hidden, -math.inf)
    if spec.sinks is not None:
        scores = torch.cat([scores, spec.sinks[:, None, None].expand(-1, n, 1)], -1)
    weights = scores.softmax(-1)[..., :n]
    return torch.einsum("hqk,khd->qhd", weights, v)
