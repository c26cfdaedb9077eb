"""Merging packed partials of all ranks, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from .message import lse_column


def merge_packed(message: Tensor, sinks: Tensor | None, merged: Tensor, first_row: int) -> None:
    """See `ops.merge_packed`."""
    rows, dim = merged.shape
    lses = lse_column(message, dim)  # [W, n]
    scores = lses
    if sinks is not None:
        own = sinks[(first_row + torch.arange(rows)) % len(sinks)]
        scores = torch.cat([lses, own[None]])
    weights = torch.softmax(scores, 0)[: len(lses)]  # NaN where no rank sees anything
    terms = message[..., :dim] * weights[..., None]  # [W, n, D] fp32
    unseen = lses == -torch.inf
    if unseen.any():  # filling costs more than all the rest
        terms.masked_fill_(unseen[..., None], 0.0)
    merged.copy_(terms.sum(0))
