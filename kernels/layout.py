"""What a kernel assumes of its tensors' memory, checked by its launcher."""

from __future__ import annotations

import torch
from torch import Tensor


def check_contiguous(dtype: torch.dtype, **tensors: Tensor) -> None:
    """Raise `ValueError` that names the first tensor not contiguous or not of `dtype`."""
    for name, tensor in tensors.items():
        if tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: wanted contiguous {dtype}, "
                f"got {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"
            )
