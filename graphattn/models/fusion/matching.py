"""How a module is known for what it computes: by its parts, and by its results on random values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor


class _Budget(NamedTuple):
    """By how many roundings two orders of the same sums may differ, relative to the values."""

    mean: float
    largest: float


# 16-bit products are summed in fp32 and rounded once: few results differ, by their last bit.
_BUDGETS = {
    torch.float32: _Budget(64.0, 512.0),
    torch.bfloat16: _Budget(0.5, 8.0),
    torch.float16: _Budget(0.5, 8.0),
}
_MEAN = 0.5  # of noise: what subtracts the mean shows


class UnfusedError(Exception):
    """Why something stays as it is, in words for the report."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arguments of one call of a module, by name."""

    named: dict[str, Any]

    @staticmethod
    def of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """Arguments as the module was called with them, `**kwargs` of its signature flattened."""
        named: dict[str, Any] = {}
        signature = inspect.signature(module.forward)
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                named |= value
            else:
                named[name] = value
        return Inputs(named)

    def call(self, function: Callable[..., Any], **changed: Any) -> Any:
        """The same call of `function`, but for some arguments."""
        return function(**self.named | changed)


def noise(like: Tensor, *shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Normal values of a dtype and device; the random states of torch stay as they are."""
    generator = torch.Generator().manual_seed(seed)
    values = scale * (torch.randn(shape, generator=generator, device="cpu") + _MEAN)
    return values.to(like.device, like.dtype)


def agree(got: Tensor, want: Tensor) -> bool:
    """Whether two results differ by rounding only. Those of a fake device have no values."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if isinstance(got, FakeTensor) or isinstance(want, FakeTensor):
        return True
    budget, eps = _BUDGETS[want.dtype], torch.finfo(want.dtype).eps
    error, size = (got - want).abs().double(), want.abs().double()
    return bool(
        error.mean() <= budget.mean * eps * size.mean()
        and error.max() <= budget.largest * eps * size.max()
    )


def check_own(module: nn.Module) -> None:
    """Raise `UnfusedError` for a module whose forward is not that of its class."""
    if "forward" in vars(module):
        raise UnfusedError(f"the forward of {type(module).__name__} was replaced")


def check_bypassed(module: nn.Module) -> None:
    """Raise `UnfusedError` for a module that has hooks: they would no longer be called."""
    if module._forward_hooks or module._forward_pre_hooks:
        raise UnfusedError(f"{type(module).__name__} has hooks")


def linears(parent: nn.Module, names: Iterable[str]) -> list[nn.Linear]:
    """The children of these names, whose weights will be read past them; `UnfusedError` unless
    they are plain linears."""
    found = []
    for name in names:
        child = getattr(parent, name, None)
        if type(child) is not nn.Linear or type(child.weight) is not nn.Parameter:
            kind = type(getattr(child, "weight", child)).__name__
            raise UnfusedError(f"{name} is no plain linear ({type(child).__name__} of {kind})")
        check_own(child)
        check_bypassed(child)
        found.append(child)
    return found


def has(parent: nn.Module, *names: str) -> bool:
    """Whether a module has children of these names."""
    children = dict(parent.named_children())
    return all(children.get(name) is not None for name in names)
