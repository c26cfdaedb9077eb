"""The message in which a rank sends rows of its partial attention.

[W, n, D + 4 / itemsize]: n rows for each of W ranks, each D values followed by the four bytes of
its fp32 LSE. D * itemsize is a multiple of 4, so the LSE is a column of the message viewed as
fp32: one aligned load or store, without conversion.
"""

from __future__ import annotations

import torch
from torch import Tensor


def lse_column(message: Tensor, dim: int) -> Tensor:
    """The LSE [W, n] fp32 of a message whose rows have `dim` values; shares its storage.

    Raises `ValueError` when the message is not such a one, or dim * itemsize is no multiple of 4.
    """
    itemsize = message.element_size()
    if dim * itemsize % 4:
        raise ValueError(
            f"message: wanted rows whose fp32 LSE is aligned, got {dim} values of {itemsize} "
            "bytes; pad the head size to an even number"
        )
    width = dim + 4 // itemsize
    if message.dim() != 3 or message.shape[2] != width or not message.is_contiguous():
        raise ValueError(
            f"message: wanted contiguous [W, n, {width}], "
            f"got {tuple(message.shape)} with strides {message.stride()}"
        )
    return message.view(torch.float32)[..., -1]
