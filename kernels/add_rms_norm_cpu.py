"""Residual add and RMS norm on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from .rms_norm_cpu import rms_norm


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    x_weight: Tensor | None,
    weight: Tensor,
    normed: Tensor,
    summed: Tensor | None,
    eps: float,
    style: str,
) -> None:
    """See `fused_ops.add_rms_norm`."""
    if x_weight is not None:
        y = torch.empty_like(x)
        rms_norm(x, x_weight, y, eps, style)
        x = y
    if residual is not None and summed is not None:
        x = torch.add(residual, x, out=summed)
    rms_norm(x, weight, normed, eps, style)
