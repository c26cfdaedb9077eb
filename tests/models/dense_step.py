"""A step of one whole sequence, attending densely in float64: no cache, batch or padding."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from graphattn.errors import UnsupportedModelError
from graphattn.models.contract import AttentionLayer, LowRank, Rotation, StepSlots


class DenseStep:
    """One sequence from position 0; logits of every place. `called` lists the layers."""

    def __init__(self, token_ids: Tensor, layers: tuple[AttentionLayer, ...]) -> None:
        self.input_ids = token_ids
        self.positions = torch.arange(len(token_ids))
        self.logits_token = torch.arange(len(token_ids))
        self.layers = layers
        self.features: dict[str, Tensor] = {}
        self.called: list[int] = []

    def layer(self, index: int) -> AbstractContextManager[None]:
        return nullcontext()

    def attend_latent(self, layer: int, q: Tensor, latent: Tensor) -> Tensor:
        latents = latent.unsqueeze(1)
        return self.attend(layer, q, latents, latents)[..., : self.layers[layer].value_dim]

    def attend_rotated(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation
    ) -> Tensor:
        rotated = torch.empty(q.shape, dtype=q.dtype)
        pools = torch.empty(2, 1, k.shape[1], len(k), k.shape[2], dtype=q.dtype)
        rotation.write(q, k, v, self.positions, rotated, pools[0], pools[1])
        return self.attend(layer, rotated, *pools[:, 0].transpose(1, 2))

    def write_latent(
        self, layer: int, latent: Tensor, rotation: Rotation, query: LowRank | None
    ) -> None:
        self.latents = torch.empty(1, *latent.shape, dtype=latent.dtype)
        rotation.write_latent(latent, self.positions, self.latents, None, query)

    def attend_written(self, layer: int, q: Tensor, up: Tensor) -> Tensor:
        averages = self.attend_latent(layer, q, self.latents[0])
        return torch.bmm(averages.transpose(0, 1), up.transpose(1, 2)).transpose(0, 1)

    @property
    def slots(self) -> StepSlots:
        raise UnsupportedModelError("a dense step has no slots")

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        spec = self.layers[layer]
        self.called.append(layer)
        group = spec.num_q_heads // spec.num_kv_heads
        k, v = (x.repeat_interleave(group, dim=1).double() for x in (k, v))
        score = torch.einsum("qhd,khd->hqk", q.double(), k) * spec.scale
        if spec.softcap:
            score = spec.softcap * torch.tanh(score / spec.softcap)
        distance = self.positions.unsqueeze(1) - self.positions
        hidden = (distance < 0) | (distance >= (spec.window or math.inf))
        score = score.masked_fill(hidden, -math.inf)
        if spec.sinks is not None:
            sink = spec.sinks.double().view(-1, 1, 1).expand(-1, score.shape[1], 1)
            score = torch.cat([score, sink], dim=-1)
        p = score.softmax(-1)[..., : len(self.positions)]
        return torch.einsum("hqk,khd->qhd", p, v).to(q.dtype)
