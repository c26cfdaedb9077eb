"""float8_e4m3fn on the CPU: what an entry of an FP8 pool holds, and what is written into it."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
_MAX = torch.finfo(FP8).max
# torch's own cast takes five times as long as a look-up.
_VALUES = torch.arange(256, dtype=torch.uint8).view(FP8).float().numpy()


def quantise(x: Tensor, scale: Tensor | None) -> Tensor:
    """fp8(x / scale) as `ops` defines it; `scale` is broadcast against x, None is 1."""
    x = x.float() if scale is None else x.float() / scale
    return x.clamp(-_MAX, _MAX).to(FP8)  # not every release of torch saturates by itself


def widen(entries: Tensor) -> Tensor:
    """Entries of a pool as fp32, without their scale."""
    if entries.dtype != FP8:
        return entries.float()
    return torch.from_numpy(_VALUES.take(entries.view(torch.uint8).numpy()))


def latent_scales(scale: Tensor, value_dim: int, dim: int) -> Tensor:
    """[dim]: the scale of an entry's values, then that of its rope key."""
    return torch.cat([scale[:1].expand(value_dim), scale[1:].expand(dim - value_dim)])
