"""Linears of one input in one product, over weights that lie one after the other.

The parameters stay the objects that they are, with their values, and become views of one storage,
in the model of their owner too: a second copy of them would cost memory, and would not follow what
is written into them. A model whose weights lie so already is left as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

_OWN_REFERENCES = 2  # to the storage of a parameter: the parameter's, and that of who asks


class Joined:
    """One linear, or several of one input."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.linears = tuple(linears)
        self.apart: str | None = None  # why they are separate products
        self._sizes = [linear.out_features for linear in linears]
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [..., K] -> one [..., N_i] for each linear."""
        if self._weight is None:
            return tuple(linear(x) for linear in self.linears)
        together = F.linear(x, self._weight, self._bias)
        return tuple(together.split(self._sizes, -1))

    def join(self) -> None:
        """Move the parameters together, unless they are or must not be; also after an exchange."""
        self._weight = self._bias = None
        weights = [linear.weight for linear in self.linears]
        biases = [linear.bias for linear in self.linears if linear.bias is not None]
        if len(self.linears) == 1:
            return
        self.apart = _why_apart(weights, biases)
        if self.apart is None:
            self._weight = _together(weights)
            self._bias = _together(biases) if biases else None


def _why_apart(weights: Sequence[Tensor], biases: Sequence[Tensor]) -> str | None:
    if biases and len(biases) < len(weights):
        return "some have a bias, some have none"
    for group in (weights, biases):
        if len({(x.dtype, x.device, x.shape[1:]) for x in group}) > 1:
            return "they differ in dtype, device or input"
        if _whole(group) is None and any(map(_is_held_elsewhere, group)):
            return "tensors beside the model hold their memory, which would stay behind"
    if any(x.is_inference() for x in (*weights, *biases)):
        return "they were made in inference mode"
    return None


def _is_held_elsewhere(parameter: Tensor) -> bool:
    """A state_dict, say, or a second model, whose tensors would no longer be the parameter's."""
    if isinstance(parameter, FakeTensor):
        return False
    storage = parameter.untyped_storage()
    alone = storage.nbytes() == parameter.nbytes
    return alone and torch._C._storage_Use_Count(storage._cdata) > _OWN_REFERENCES


@torch.no_grad()
def _together(parts: Sequence[Tensor]) -> Tensor:
    """The parts as one tensor, stacked along their first dimension; they are views of it."""
    whole = _whole(parts)
    if whole is None:
        whole = torch.cat([part.detach() for part in parts])
        if not isinstance(whole, FakeTensor):
            for part, place in zip(parts, whole.split([len(x) for x in parts]), strict=True):
                part.data = place
    return whole


def _whole(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor of which these are adjacent parts, in this order."""
    if not parts or any(isinstance(part, FakeTensor) for part in parts):
        return None
    first, end = parts[0], parts[0].storage_offset()
    for part in parts:
        same = part.untyped_storage()._cdata == first.untyped_storage()._cdata
        if not same or part.storage_offset() != end or not part.is_contiguous():
            return None
        end += part.numel()
    rows = sum(len(part) for part in parts)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())
