"""Packing output rows and their LSE into one message per rank, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_partial(out: Tensor, lse: Tensor, message: Tensor, by_head: bool) -> None:
    """See `ops.pack_partial`."""
    ranks, rows, _ = message.shape
    tokens, heads, dim = out.shape
    values, weights = message[..., :dim], message[..., dim:]
    if by_head:
        shape = (tokens, ranks, heads // ranks)
        values.copy_(out.view(*shape, dim).transpose(0, 1).reshape(ranks, rows, dim))
        packed = lse.view(shape).transpose(0, 1).reshape(ranks, rows)
    else:
        flat = torch.zeros(ranks * rows, dim, dtype=out.dtype)
        flat[: tokens * heads] = out.reshape(-1, dim)
        values.copy_(flat.view(ranks, rows, dim))
        packed = torch.full((ranks * rows,), -torch.inf)
        packed[: tokens * heads] = lse.reshape(-1)
        packed = packed.view(ranks, rows)
    weights.copy_(packed.contiguous().view(ranks, rows, 1).view(message.dtype))
