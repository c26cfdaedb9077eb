"""Oracle of `pack_partial`: one row after the other, as bytes."""

from __future__ import annotations

import struct

import torch
from torch import Tensor


def pack_partial_ref(out: Tensor, lse: Tensor, message: Tensor, by_head: bool) -> None:
    """Write into message (on the CPU) what `ops.pack_partial` must write."""
    tokens, heads, dim = out.shape
    ranks, rows, _ = message.shape
    order = [(t, h) for t in range(tokens) for h in range(heads)]
    if by_head:
        order.sort(key=lambda place: place[1] // (heads // ranks))  # stable: tokens stay in order
    for i in range(ranks * rows):
        values, number = torch.zeros(dim, dtype=out.dtype), float("-inf")
        if i < len(order):
            t, h = order[i]
            values, number = out[t, h].cpu(), float(lse[t, h])
        row = bytes(values.view(torch.uint8).tolist()) + struct.pack("=f", number)
        message[i // rows, i % rows] = torch.tensor(list(row), dtype=torch.uint8).view(out.dtype)
