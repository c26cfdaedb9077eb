"""A small random decoder with latent layers, beside one that is not, and a naive way to run it.

Its latents and queries are plain products of the hidden state, so that a test can say what the
attention has to give without any of MLA's names.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphattn.models.contract import AttentionLayer, ModelStep
from tests.runtime.tiny_model import TinyModel, dense_attention


class TinyLatent(TinyModel):
    """One layer for each of `windows`; those in `latent` keep latents, the others K and V."""

    def __init__(
        self,
        *,
        windows: tuple[int, ...] = (0, 5, 0),
        latent: tuple[int, ...] = (0, 1),
        latent_dim: int = 12,
        value_dim: int = 7,
        seed: int = 0,
        num_q_heads: int = 6,
    ) -> None:
        super().__init__(windows=windows, seed=seed, num_q_heads=num_q_heads)
        hidden = self.embed.weight.shape[1]
        self.query = nn.ModuleList(nn.Linear(hidden, num_q_heads * latent_dim) for _ in windows)
        self.latent = nn.ModuleList(nn.Linear(hidden, latent_dim) for _ in windows)
        self.back = nn.ModuleList(nn.Linear(num_q_heads * value_dim, hidden) for _ in windows)
        self.attention_layers = tuple(
            AttentionLayer(
                num_q_heads,
                1,
                latent_dim,
                scale=1 / math.sqrt(latent_dim),
                window=spec.window,
                value_dim=value_dim,
            )
            if layer in latent
            else spec
            for layer, spec in enumerate(self.attention_layers)
        )
        for parameter in self.parameters():
            parameter.requires_grad_(False)

    def queries(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """q [T, heads, latent_dim] and latent [T, latent_dim]."""
        normed = F.layer_norm(x, x.shape[-1:])
        spec = self.attention_layers[layer]
        q = self.query[layer](normed).view(-1, spec.num_q_heads, spec.head_dim)
        return q, self.latent[layer](normed)

    def forward(self, step: ModelStep) -> Tensor:
        x = self.embed(step.input_ids) + self.position(step.positions)
        for layer, spec in enumerate(self.attention_layers):
            if spec.value_dim:
                out = step.attend_latent(layer, *self.queries(layer, x))
                x = x + self.back[layer](out.flatten(1))
            else:
                x = x + self.out[layer](step.attend(layer, *self._split(layer, x)).flatten(1))
        return self.head(F.layer_norm(x[step.logits_token], x.shape[-1:]))

    def dense_logits(self, token_ids: list[int]) -> Tensor:
        n = len(token_ids)
        x = self.embed(torch.tensor(token_ids, device=self.device)) + self.position.weight[:n]
        for layer, spec in enumerate(self.attention_layers):
            if spec.value_dim:
                q, latent = self.queries(layer, x)
                keys = latent.unsqueeze(1)
                out = dense_attention(q, keys, keys[..., : spec.value_dim], spec)
                x = x + self.back[layer](out.flatten(1))
            else:
                out = dense_attention(*self._split(layer, x), spec)
                x = x + self.out[layer](out.flatten(1))
        return self.head(F.layer_norm(x, x.shape[-1:]))
