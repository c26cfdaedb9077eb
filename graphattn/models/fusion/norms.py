"""RMS norms as one operation, that of the next layer together with the residual sum before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from graphattn.kernels import fused_ops
from graphattn.models.fusion.matching import UnfusedError, agree, check_bypassed, check_own, noise

_STYLES = ("rounded", "wide", "offset")  # of `fused_ops.add_rms_norm`
_SCALES = (1.0, 30.0, 1e-3)  # of rows: in the last one eps shows


@dataclass(frozen=True, slots=True)
class Formula:
    """What `fused_ops.add_rms_norm` is told of a norm beside its weight."""

    eps: float
    style: str


def formula_of(module: nn.Module, dtype: torch.dtype) -> Formula:
    """How a module norms; `UnfusedError` when it is no RMS norm as we have it."""
    weight, eps = getattr(module, "weight", None), _eps(module)
    tensors = [*module.parameters(), *module.buffers()]
    if eps is None or not isinstance(weight, Tensor) or weight.dim() != 1 or len(tensors) != 1:
        raise UnfusedError(f"{type(module).__name__} is no RMS norm")
    check_own(module)
    check_bypassed(module)
    if weight.dtype != dtype or type(weight) is not nn.Parameter:
        raise UnfusedError(f"{type(module).__name__} has a weight of {weight.dtype}")
    rows = noise(weight, len(_SCALES), len(weight)) * weight.new_tensor(_SCALES).unsqueeze(1)
    want = module(rows)
    formulas = [Formula(eps, style) for style in _STYLES]
    fitting = [x for x in formulas if _agree_by_row(normed(rows, weight, x), want)]
    if not fitting:
        raise UnfusedError(f"{type(module).__name__} is another norm than an RMS norm")
    if isinstance(want, FakeTensor):
        return fitting[0]
    # 16-bit: two of them may differ in the last bit only
    return min(fitting, key=lambda x: float((normed(rows, weight, x) - want).abs().sum()))


def normed(x: Tensor, weight: Tensor, formula: Formula) -> Tensor:
    """x [..., N] normed along its last dimension."""
    rows = x.flatten(0, -2)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    fused_ops.add_rms_norm(rows, None, None, weight, out, None, formula.eps, formula.style)
    return out.view(x.shape)


class Norm:
    """In place of a norm's forward.

    Who makes the residual stream can hand on its norm with it: the sum and the norm of the sum are
    one operation then. It is taken for that very tensor only, and once.
    """

    def __init__(self, module: Any, formula: Formula) -> None:
        self.module, self.formula = module, formula
        self._handed: tuple[Tensor, Tensor] | None = None

    @property
    def weight(self) -> Tensor:
        """As the module has it now."""
        weight: Tensor = self.module.weight
        return weight

    def hand(self, summed: Tensor, result: Tensor) -> None:
        """`result` is the norm of `summed`."""
        self._handed = summed, result

    def forget(self) -> None:
        """Take nothing of what was handed on."""
        self._handed = None

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """[..., N] -> [..., N]"""
        handed, self._handed = self._handed, None
        if handed is not None and handed[0] is hidden_states:
            return handed[1]
        return normed(hidden_states, self.weight, self.formula)


def add(
    residual: Tensor, x: Tensor, after: Norm | None, following: Norm | None
) -> tuple[Tensor, Tensor]:
    """The sum of residual and x, which `after` norms first, and what `following` makes of it."""
    if following is None or (after is not None and after.formula != following.formula):
        summed = residual + (x if after is None else after(x))
        return summed, summed if following is None else following(summed)
    summed = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    result = torch.empty_like(summed)
    width = residual.shape[-1]
    fused_ops.add_rms_norm(
        x.view(-1, width),
        residual.view(-1, width),
        None if after is None else after.weight,
        following.weight,
        result.view(-1, width),
        summed.view(-1, width),
        following.formula.eps,
        following.formula.style,
    )
    return summed, result


def _agree_by_row(got: Tensor, want: Tensor) -> bool:
    return all(agree(a, b) for a, b in zip(got, want, strict=True))


def _eps(module: nn.Module) -> float | None:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return eps if isinstance(eps, float) else None
