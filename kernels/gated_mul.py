"""Gated activation on the device: see `fused_ops.gated_mul`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .formulas import ACTIVATIONS, check_formula
from .layout import check_rows
from .strides import stride_unit

BLOCK = 1024  # values per program


@triton.jit(do_not_specialize=["gate_row", "up_row", "out_row"])
def gated_mul_kernel(  # noqa: D103
    gate_ptr,
    up_ptr,
    out_ptr,
    gate_row,
    up_row,
    out_row,
    STRIDE_UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    DTYPE: tl.constexpr = gate_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * STRIDE_UNIT
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = o < WIDTH
    b_gate = tl.load(gate_ptr + row * gate_row + o, mask=m, other=0.0).to(tl.float32)
    b_up = tl.load(up_ptr + row * up_row + o, mask=m, other=0.0).to(tl.float32)
    b_slope = b_gate
    if ACTIVATION == "gelu_tanh":  # (1 + tanh y) / 2 = 1 / (1 + exp(-2 y))
        b_slope = 1.5957691216057308 * (b_gate + 0.044715 * b_gate * b_gate * b_gate)
    b_exp = tl.exp(-tl.abs(b_slope))
    b_sigmoid = tl.where(b_slope < 0, b_exp, 1.0) / (1.0 + b_exp)
    b_active = (b_gate * b_sigmoid).to(DTYPE).to(tl.float32)
    tl.store(out_ptr + row * out_row + o, b_active * b_up, mask=m)


def gated_mul(gate: Tensor, up: Tensor, out: Tensor, activation: str) -> None:
    """Write out = activation(gate) * up, all [T, I].

    Raises `ValueError` that names the argument when shapes, dtypes or strides do not fit.
    """
    check_formula("activation", activation, ACTIVATIONS)
    check_rows(gate.dtype, gate=gate, up=up, out=out)
    for name, tensor in (("up", up), ("out", out)):
        if tensor.shape != gate.shape:
            raise ValueError(f"{name}: wanted shape {tuple(gate.shape)}, got {tuple(tensor.shape)}")
    rows, width = gate.shape
    if rows == 0:
        return
    strides = (gate.stride(0), up.stride(0), out.stride(0))
    unit = stride_unit(strides)
    gated_mul_kernel[(rows, triton.cdiv(width, BLOCK))](
        gate,
        up,
        out,
        *(stride // unit for stride in strides),
        STRIDE_UNIT=unit,
        WIDTH=width,
        BLOCK=BLOCK,
        ACTIVATION=activation,
        num_warps=4,
    )
