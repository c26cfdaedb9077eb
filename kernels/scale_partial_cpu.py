"""A rank's weighted partial output, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor


def scale_partial(
    out: Tensor, lse: Tensor, lses: Tensor, sinks: Tensor | None, scaled: Tensor
) -> None:
    """See `ops.scale_partial`."""
    slices, tokens, heads, dim = scaled.shape
    total = torch.logsumexp(lses, 0)  # [T, H]; -inf where no rank sees anything
    if sinks is not None:
        total = torch.logaddexp(total, sinks)
    shape = (tokens, slices, heads)
    weight = torch.exp(lse - total).view(*shape, 1)
    target = scaled.transpose(0, 1)  # [T, n, H / n, D]
    torch.mul(out.view(*shape, dim), weight, out=target)
    target.masked_fill_((lse == -torch.inf).view(*shape, 1), 0.0)
