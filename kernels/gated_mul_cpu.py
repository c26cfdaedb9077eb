"""Gated activation on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .formulas import ACTIVATIONS, check_formula


def gated_mul(gate: Tensor, up: Tensor, out: Tensor, activation: str) -> None:
    """See `fused_ops.gated_mul`."""
    check_formula("activation", activation, ACTIVATIONS)
    active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    torch.mul(active, up, out=out)
