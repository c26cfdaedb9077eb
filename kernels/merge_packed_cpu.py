"""Merging packed partials of all ranks, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_packed(message: Tensor, sinks: Tensor | None, merged: Tensor, first_row: int) -> None:
    """See `ops.merge_packed`."""
    rows, dim = merged.shape
    values = message[..., :dim].float()
    lses = message[..., dim:].contiguous().view(torch.float32).view(-1, rows)  # [W, n]
    total = torch.logsumexp(lses, 0)
    if sinks is not None:
        index = (first_row + torch.arange(rows)) % len(sinks)
        total = torch.logaddexp(total, sinks[index])
    seen = (lses > -torch.inf)[..., None]
    weight = torch.exp(lses - total)[..., None]
    merged.copy_(torch.where(seen, values * weight, 0.0).sum(0))
