"""A rank's weighted partial output, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor


def scale_partial(
    out: Tensor, lse: Tensor, lses: Tensor, sinks: Tensor | None, scaled: Tensor
) -> None:
    """See `ops.scale_partial`."""
    total = torch.logsumexp(lses, 0)  # [T, H]; -inf where no rank sees anything
    if sinks is not None:
        total = torch.logaddexp(total, sinks)
    weight = torch.exp(lse - total).masked_fill_(lse == -torch.inf, 0.0)
    slices, tokens, heads, dim = scaled.shape
    product = (out.float() * weight[..., None]).masked_fill_(weight[..., None] == 0, 0.0)
    scaled.copy_(product.view(tokens, slices, heads, dim).transpose(0, 1))
