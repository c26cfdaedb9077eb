"""RMS norm over the last dimension on the CPU, in the order of the models' own operations."""

from __future__ import annotations

import torch
from torch import Tensor

from .formulas import STYLES, check_formula


def rms_norm(x: Tensor, weight: Tensor, out: Tensor, eps: float, style: str) -> None:
    """Norm of x [..., n] as `fused_ops` defines it; `out` may be `x`."""
    check_formula("style", style, STYLES)
    if x.dtype != torch.float32:
        _rms_norm_rounded(x, weight, out, eps, style)
        return
    inverse = torch.mul(x, x).mean(-1, keepdim=True).add_(eps).rsqrt_()
    factor = weight + 1.0 if style == "offset" else weight
    torch.mul(x, inverse, out=out).mul_(factor)


def _rms_norm_rounded(x: Tensor, weight: Tensor, out: Tensor, eps: float, style: str) -> None:
    wide = x.float()
    z = wide * (wide * wide).mean(-1, keepdim=True).add_(eps).rsqrt_()
    if style == "rounded":
        torch.mul(z.to(x.dtype), weight, out=out)
    else:
        factor = weight.float() + 1.0 if style == "offset" else weight.float()
        out.copy_(z.mul_(factor))
