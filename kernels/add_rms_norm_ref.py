"""Oracle of `add_rms_norm`: float64, nothing rounded."""

from __future__ import annotations

from torch import Tensor

from .rms_norm_ref import rms_norm_ref


def add_rms_norm_ref(
    x: Tensor,
    residual: Tensor | None,
    x_weight: Tensor | None,
    weight: Tensor,
    eps: float,
    style: str,
) -> tuple[Tensor, Tensor]:
    """Exact (normed, summed) [T, H], float64 on the CPU; without a residual `summed` is y."""
    y = x.double().cpu() if x_weight is None else rms_norm_ref(x, x_weight, eps, style)
    summed = y if residual is None else residual.double().cpu() + y
    return rms_norm_ref(summed, weight, eps, style), summed
