"""Merging packed partials of all ranks, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from .message import lse_column


def merge_packed(message: Tensor, sinks: Tensor | None, merged: Tensor, first_row: int) -> None:
    """See `ops.merge_packed`."""
    rows, dim = merged.shape
    lses = lse_column(message, dim)  # [W, n]
    total = torch.logsumexp(lses, 0)
    if sinks is not None:
        total = torch.logaddexp(total, sinks[(first_row + torch.arange(rows)) % len(sinks)])
    terms = message[..., :dim] * torch.exp(lses - total)[..., None]  # [W, n, D] fp32
    merged.copy_(terms.masked_fill_((lses == -torch.inf)[..., None], 0.0).sum(0))
