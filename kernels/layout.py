"""What a kernel assumes of its tensors' memory, checked by its launcher."""

from __future__ import annotations

import torch
from torch import Tensor

# NumPy knows no bfloat16: bits move as integers of the same size, by the bytes of an element.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_contiguous(dtype: torch.dtype, **tensors: Tensor) -> None:
    """Raise `ValueError` that names the first tensor not contiguous or not of `dtype`."""
    for name, tensor in tensors.items():
        if tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: wanted contiguous {dtype}, "
                f"got {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"
            )


def check_rows(dtype: torch.dtype, **tensors: Tensor) -> None:
    """Raise `ValueError` that names the first tensor not of `dtype` or whose rows [n, m] are not
    contiguous one by one."""
    for name, tensor in tensors.items():
        if tensor.dtype != dtype or tensor.dim() != 2 or tensor.stride(1) != 1:
            raise ValueError(
                f"{name}: wanted {dtype} in contiguous rows, "
                f"got {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"
            )
