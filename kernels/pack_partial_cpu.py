"""Packing output rows and their LSE into one message per rank, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from .message import lse_column


def pack_partial(out: Tensor, lse: Tensor, message: Tensor, by_head: bool) -> None:
    """See `ops.pack_partial`."""
    tokens, heads, dim = out.shape
    values, weights = message[..., :dim], lse_column(message, dim)
    if by_head:
        split = (tokens, len(message), heads // len(message))
        packed = (split[1], split[0], split[2])
        values.unflatten(1, packed[1:]).copy_(out.view(*split, dim).transpose(0, 1))
        weights.unflatten(1, packed[1:]).copy_(lse.view(split).transpose(0, 1))
        return
    rows = tokens * heads
    values, weights = values.flatten(0, 1), weights.flatten(0, 1)  # views: rows lie evenly
    values[:rows].copy_(out.view(rows, dim))
    weights[:rows].copy_(lse.view(rows))
    values[rows:].zero_()
    weights[rows:].fill_(-torch.inf)
