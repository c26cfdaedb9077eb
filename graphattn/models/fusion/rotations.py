"""How a model rotates: where its cosines lie, and which values of a head are a pair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """`take` makes cosines and sines [T, R / 2], one per pair, of a module's position embeddings.
    It raises for embeddings of another kind. The pairs are those of `fused_ops.rope_write`."""

    take: Callable[[Any], tuple[Tensor, Tensor]]
    pairs_in: bool
    pairs_out: bool


def _twice(embeddings: Any) -> tuple[Tensor, Tensor]:
    """cat(angles, angles)"""
    cos, sin = embeddings
    half = cos.shape[-1] // 2
    return cos[0, :, :half], sin[0, :, :half]


def _repeated(embeddings: Any) -> tuple[Tensor, Tensor]:
    """repeat_interleave(angles, 2)"""
    cos, sin = embeddings
    return cos[0, :, ::2], sin[0, :, ::2]


def _repeated_wide(embeddings: Any) -> tuple[Tensor, Tensor]:
    """The same, of models that rotate in fp32."""
    cos, sin = _repeated(embeddings)
    return cos.float(), sin.float()


def _once(embeddings: Any) -> tuple[Tensor, Tensor]:
    cos, sin = embeddings
    return cos[0], sin[0]


def _complex(embeddings: Any) -> tuple[Tensor, Tensor]:
    """cos + i sin"""
    parts = torch.view_as_real(embeddings[0])
    return parts[..., 0], parts[..., 1]


# What modules of transformers do, the most common first.
LAYOUTS = (
    Layout(_twice, False, False),
    Layout(_twice, True, False),
    Layout(_twice, True, True),
    Layout(_repeated, True, True),
    Layout(_repeated_wide, True, True),
    Layout(_once, False, False),
    Layout(_complex, True, True),
)
