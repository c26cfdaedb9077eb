"""Oracle of the RMS norm inside `fused_ops`: float64, one row at a time, nothing rounded."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float, style: str) -> Tensor:
    """Exact norm of x [..., n], float64 on the CPU."""
    wide = x.double().cpu()
    factor = weight.double().cpu() + (1.0 if style == "offset" else 0.0)
    rows = wide.reshape(-1, wide.shape[-1])
    normed = torch.empty_like(rows)
    for i, row in enumerate(rows.tolist()):
        mean = math.fsum(value * value for value in row) / len(row)
        normed[i] = rows[i] / math.sqrt(mean + eps) * factor
    return normed.view(wide.shape)
