"""RMS norm over the last dimension on the CPU, in the order of the models' own operations."""

from __future__ import annotations

import torch
from torch import Tensor

from .formulas import STYLES, check_formula


def rms_norm(x: Tensor, weight: Tensor, out: Tensor, eps: float, style: str) -> None:
    """Norm of x [..., n] as `fused_ops` defines it; `out` may be `x`."""
    check_formula("style", style, STYLES)
    wide = x.float()
    inverse = torch.mul(wide, wide).mean(-1, keepdim=True).add_(eps).rsqrt_()
    if style == "rounded" and x.dtype != torch.float32:
        torch.mul((wide * inverse).to(x.dtype), weight, out=out)
        return
    factor = weight.float() + 1.0 if style == "offset" else weight.float()
    if x.dtype == torch.float32:
        torch.mul(wide, inverse, out=out).mul_(factor)
    else:
        out.copy_((wide * inverse).mul_(factor))
