"""Checks of tensor arguments from what the host knows: shape, dtype, strides, device.

None reads a device value, so a checked call can be captured like an unchecked one. Errors are
`ConfigError`s that name the argument, what was wanted, what came, and the fix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from graphattn.errors import wrong

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INT32 = (torch.int32,)
INT64 = (torch.int64,)
FP32 = (torch.float32,)
FP8 = torch.float8_e4m3fn  # pools may hold it whatever the dtype of K and V

Strides = Literal["contiguous", "rows"]  # rows: any strides with a contiguous last dimension
Size = int | str


class Arguments:
    """The tensors of one call: sizes that they share by name, and their device.

    The first tensor whose layout has a name fixes its size for those that follow.
    """

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self._device: torch.device | None = None
        self._first = ""

    def take(
        self,
        name: str,
        tensor: object,
        layout: Sequence[Size],
        dtypes: Sequence[torch.dtype],
        strides: Strides = "rows",
        *,
        written: bool = False,
    ) -> Tensor:
        """Check one argument and return it. `written`: the call writes into it."""
        if not isinstance(tensor, Tensor):
            raise wrong(name, "a tensor", type(tensor).__name__, f"Pass {_shape(layout)}.")
        self._take_shape(name, tensor, layout)
        if tensor.dtype not in dtypes:
            kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise wrong(name, kinds, tensor.dtype, _conversion(name, tensor.dtype, dtypes))
        self._take_device(name, tensor)
        self._take_strides(name, tensor, strides, written)
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise wrong(
                name,
                "a call that records no gradient",
                "a tensor that requires grad",
                "These operations have no backward: run under torch.no_grad(), or detach.",
            )
        return tensor

    def _take_shape(self, name: str, tensor: Tensor, layout: Sequence[Size]) -> None:
        shape = tuple(tensor.shape)
        sizes = dict(self.sizes)
        fits = len(shape) == len(layout) and all(
            n == (size if isinstance(size, int) else sizes.setdefault(size, n))
            for n, size in zip(shape, layout, strict=True)
        )
        if not fits:
            known = [f"{n} = {self.sizes[n]}" for n in map(str, layout) if n in self.sizes]
            where = f" with {', '.join(known)}" if known else ""
            raise wrong(
                name,
                f"shape {_shape(layout)}{where}",
                list(shape),
                "Pass a view of that shape; the docstring says what each size is.",
            )
        self.sizes = sizes

    def _take_device(self, name: str, tensor: Tensor) -> None:
        if self._device is None:
            self._device, self._first = tensor.device, name
        if tensor.device != self._device:
            raise wrong(
                name,
                f"a tensor on {self._device}, where {self._first} is",
                str(tensor.device),
                "Allocate it there, outside the step.",
            )

    def _take_strides(self, name: str, tensor: Tensor, strides: Strides, written: bool) -> None:
        if tensor.numel() == 0:
            return
        if strides == "contiguous" and not tensor.is_contiguous():
            raise wrong(name, "contiguous memory", list(tensor.stride()), "Call .contiguous().")
        if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise wrong(
                name,
                "a contiguous last dimension",
                list(tensor.stride()),
                "Permute the view so that the values of one head or row lie side by side.",
            )
        repeated = any(
            n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        if written and repeated:
            raise wrong(
                name,
                "memory of its own for every element",
                list(tensor.stride()),
                "It is written to: pass a tensor that was not expanded.",
            )


def check_number(
    name: str, value: object, *, above: float = -math.inf, least: float = -math.inf
) -> None:
    """Raise `ConfigError` unless `value` is a finite Python number > `above` and >= `least`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not above < value or value < least:  # type: ignore[arg-type,operator]
        bound = f" > {above}" if above > -math.inf else f" >= {least}" if least > -math.inf else ""
        came = type(value).__name__ if isinstance(value, Tensor) else value
        raise wrong(
            name, f"a finite Python number{bound}", came, "It is fixed at capture, not a tensor."
        )


def check_range(name: str, what: str, value: int, most: int) -> None:
    """Raise `ConfigError` unless 1 <= value <= most; `what` the argument `name` gives."""
    if not 1 <= value <= most:
        raise wrong(name, f"{what} from 1 to {most}", value, "The kernels cover no other.")


def _shape(layout: Sequence[Size]) -> str:
    return f"[{', '.join(map(str, layout))}]"


def _conversion(name: str, came: torch.dtype, wanted: Sequence[torch.dtype]) -> str:
    if came == torch.int64 and wanted == INT32:
        return (
            f"Keep it as int32, or convert it in the step: buffer.copy_({name}) or "
            f"{name}.to(torch.int32); page ids and lengths fit."
        )
    if came == torch.int32 and wanted == INT64:
        return f"Convert it: {name}.to(torch.int64); products with the page size need it."
    return f"Allocate it with that dtype, or convert it: {name}.to({wanted[0]})."
