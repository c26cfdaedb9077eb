"""A rank's weighted partial output, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor


def scale_partial(
    out: Tensor, lse: Tensor, lses: Tensor, sinks: Tensor | None, scaled: Tensor
) -> None:
    """See `ops.scale_partial`."""
    slices, tokens, heads, dim = scaled.shape
    inverse = torch.exp(lses - lse).sum(0)  # [T, H]; inf for a vanishing weight, NaN where unseen
    if sinks is not None:
        inverse += torch.exp(sinks - lse)
    shape = (tokens, slices, heads)
    target = scaled.transpose(0, 1)  # [T, n, H / n, D]
    torch.mul(out.view(*shape, dim), inverse.reciprocal_().view(*shape, 1), out=target)
    unseen = lse == -torch.inf
    if unseen.any():  # filling costs more than all the rest
        target.masked_fill_(unseen.view(*shape, 1), 0.0)
