"""Stand-ins for values and shapes that depend on device data, so that an audit can go on.

Shapes are upper bounds, numbers are 1 and conditions true.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import CaptureError

aten = torch.ops.aten


def function_result(func: Any, tensor: Tensor) -> Any:
    """What a torch function that reads `tensor` on the host might return."""
    if func is Tensor.tolist:
        return np.ones(tuple(tensor.shape), dtype=_numpy_dtype(tensor.dtype)).tolist()
    if func in (Tensor.numpy, Tensor.__array__):
        return np.ones(tuple(tensor.shape), dtype=_numpy_dtype(tensor.dtype))
    if func in (Tensor.__repr__, Tensor.__format__):
        return f"tensor(..., size={tuple(tensor.shape)})"
    if func is Tensor.data_ptr:
        return 0
    if func is Tensor.pin_memory:
        return tensor
    if func is Tensor.backward:
        return None
    if func in (torch.tensor_split, Tensor.tensor_split):
        return (tensor,)
    raise CaptureError(f"{func} cannot be stood in for.")


def _numpy_dtype(dtype: torch.dtype) -> type:
    if dtype is torch.bool:
        return np.bool_
    return np.float32 if dtype.is_floating_point else np.int64


def op_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operation whose value or shape depends on device data might return."""
    make = _OP_RESULTS.get(func.overloadpacket)
    if make is None:
        raise CaptureError(f"{func} has a result that cannot be stood in for.")
    return make(*args, **kwargs)


def _scalar(x: Tensor) -> bool | int | float:
    if x.dtype is torch.bool:
        return True
    return 1.0 if x.dtype.is_floating_point else 1


def _indices(x: Tensor) -> Tensor:
    """As many indices as `x` has elements."""
    return x.new_empty(max(1, x.numel()), dtype=torch.int64)


def _nonzero(x: Tensor) -> Tensor:
    return x.new_empty((max(1, x.numel()), x.dim()), dtype=torch.int64)


def _unmasked(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Boolean masks as lists of positions, one for each of their dimensions."""
    result: list[Tensor | None] = []
    for index in indices:
        if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
            result.extend([_indices(index)] * max(1, index.dim()))
        else:
            result.append(index)
    return result


def _unique(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.reshape(-1), torch.empty_like(x, dtype=torch.int64), _indices(x)


def _unique_dim(x: Tensor, dim: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    positions = x.new_empty(x.shape[dim], dtype=torch.int64)
    return x.clone(), positions, positions.clone()


_OP_RESULTS: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense: _scalar,
    aten.equal: lambda *args: True,
    aten.nonzero: _nonzero,
    aten.masked_select: lambda x, mask: x.new_empty(x.numel()),
    aten.index: lambda x, indices: aten.index.Tensor(x, _unmasked(indices)),
    aten.index_put: lambda x, *args, **kwargs: x.clone(),
    aten.index_put_: lambda x, *args, **kwargs: x,
    aten._index_put_impl_: lambda x, *args, **kwargs: x,
    aten._unique2: _unique,
    aten.unique_consecutive: _unique,
    aten.unique_dim: _unique_dim,
    aten.unique_dim_consecutive: _unique_dim,
    aten.bincount: lambda x, weights=None, minlength=0: x.new_empty(max(1, minlength)),
    aten.repeat_interleave: lambda repeats, **kwargs: _indices(repeats),
}
