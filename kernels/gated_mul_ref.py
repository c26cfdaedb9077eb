"""Oracle of `gated_mul`: float64, one value at a time, nothing rounded."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def gated_mul_ref(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Exact activation(gate) * up, float64 on the CPU."""
    active = {"silu": _silu, "gelu_tanh": _gelu_tanh}[activation]
    values = [active(x) for x in gate.double().flatten().tolist()]
    return torch.tensor(values, dtype=torch.float64).view(gate.shape) * up.double().cpu()


def _silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def _gelu_tanh(x: float) -> float:
    return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
