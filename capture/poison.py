"""Contents from which nothing can go on."""

from __future__ import annotations

import torch
from torch import Tensor

HUGE_ID = 2**30  # out of bounds wherever it is taken for an index


def poison(*tensors: Tensor) -> None:
    """Fill with NaN, with indices out of any bounds, with True."""
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        elif tensor.dtype is torch.bool:
            tensor.fill_(True)
        else:
            tensor.fill_(min(HUGE_ID, torch.iinfo(tensor.dtype).max))
