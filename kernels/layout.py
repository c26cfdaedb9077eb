"""What a kernel assumes of its tensors' memory, checked by its launcher."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# NumPy has not these dtypes: their bits move as integers of the same size.
BITS = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}


def as_array(x: Tensor) -> np.ndarray:
    """The memory of x on the CPU: its values, or bits where NumPy has not its dtype."""
    bits = BITS.get(x.dtype)
    return x.numpy() if bits is None else x.view(bits).numpy()


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
