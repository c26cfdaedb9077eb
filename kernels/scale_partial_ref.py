"""Oracle of `scale_partial`: float64, one token and one head at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def scale_partial_ref(
    out: Tensor, lse: Tensor, lses: Tensor, sinks: Tensor | None, slices: int
) -> Tensor:
    """Exact scaled [slices, T, H / slices, D], float64 on the CPU; see `ops.scale_partial`."""
    out, lse, lses = out.double().cpu(), lse.double().cpu(), lses.double().cpu()
    tokens, heads, dim = out.shape
    share = heads // slices
    scaled = torch.zeros(slices, tokens, share, dim, dtype=torch.float64)
    for t in range(tokens):
        for h in range(heads):
            own = float(lse[t, h])
            if own == -math.inf:
                continue
            others = lses[:, t, h].tolist() + ([] if sinks is None else [float(sinks[h])])
            base = max(others)
            weight = math.exp(own - base) / sum(math.exp(other - base) for other in others)
            scaled[h // share, t, h % share] = weight * out[t, h]
    return scaled
