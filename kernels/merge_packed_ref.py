"""Oracle of `merge_packed`: float64, one row at a time, from the bytes of the message."""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor


def merge_packed_ref(message: Tensor, sinks: Tensor | None, first_row: int) -> Tensor:
    """Exact merged [n, D], float64 on the CPU; see `ops.merge_packed`."""
    message = message.cpu()
    ranks, rows, width = message.shape
    dim = width - 4 // message.element_size()
    merged = torch.zeros(rows, dim, dtype=torch.float64)
    for i in range(rows):
        data = [bytes(message[w, i].view(torch.uint8).tolist()) for w in range(ranks)]
        lses = [struct.unpack("=f", row[-4:])[0] for row in data]
        sink = -math.inf if sinks is None else float(sinks[(first_row + i) % len(sinks)])
        base = max(*lses, sink)
        for w, lse in enumerate(lses):
            if lse != -math.inf:
                weight = math.exp(lse - base) / sum(math.exp(x - base) for x in [*lses, sink])
                merged[i] += weight * message[w, i, :dim].double()
    return merged
