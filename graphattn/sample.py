"""Choosing tokens: one sampled token per logits place."""

from __future__ import annotations

from torch import Tensor

from graphattn.kernels import ops


def select(logits: Tensor, sampled: Tensor) -> None:
    """Stage: sampled[L] int32 = the greedy token of logits [L, V]; -1 where they hold a NaN."""
    ops.greedy(logits, sampled)
