"""Gated MLPs: gate and up in one product, activation and their product in one operation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphattn.kernels import fused_ops
from graphattn.models.fusion.joined import Joined
from graphattn.models.fusion.matching import UnfusedError, agree, check_own, has, linears, noise

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class GatedMLP:
    """In place of an MLP's forward."""

    def __init__(self, joined: Joined, down: nn.Module, activation: str) -> None:
        self.joined, self._down, self._activation = joined, down, activation

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """[..., H] -> [..., H]"""
        parts = self.joined(hidden_states)
        gate, up = parts if len(parts) == 2 else parts[0].chunk(2, -1)
        product = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        rows = (x.flatten(0, -2) for x in (gate, up, product))
        fused_ops.gated_mul(*rows, self._activation)
        result: Tensor = self._down(product)
        return result


def is_mlp(module: nn.Module) -> bool:
    """Whether a module has the parts of a gated MLP."""
    return has(module, "down_proj") and (
        has(module, "gate_proj", "up_proj") or has(module, "gate_up_proj")
    )


def gated_mlp(module: nn.Module) -> GatedMLP:
    """What computes the same; `UnfusedError` when it is not that."""
    check_own(module)
    names = ["gate_up_proj"] if has(module, "gate_up_proj") else ["gate_proj", "up_proj"]
    first, down = linears(module, names), module.get_submodule("down_proj")
    others = [x for x in module.children() if x not in (*first, down)]
    if len(others) != 1:
        raise UnfusedError(f"{type(module).__name__} has other parts than a gated MLP")
    (activation,) = others
    fused = GatedMLP(Joined(first), down, _name_of(activation))
    x = noise(first[0].weight, 1, 2, first[0].in_features)
    if not agree(fused(x), module(x)):
        raise UnfusedError(f"{type(module).__name__} is another formula than a gated MLP")
    return fused


def _name_of(activation: nn.Module) -> str:
    """In fp32, where they differ by more than rounding."""
    x = torch.linspace(-3.0, 3.0, 257, device="cpu")
    for name, function in _ACTIVATIONS.items():
        if agree(function(x), activation(x)):
            return name
    raise UnfusedError(f"activation {type(activation).__name__}")
