"""Add to the residual, and RMS norm of the sum, on the device: see `fused_ops.add_rms_norm`.

One program per row, which it holds in registers: each value is read and written once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .formulas import STYLES, check_formula
from .layout import check_contiguous, check_rows
from .rms_norm import inverse_rms, weighted
from .strides import stride_unit

MAX_WIDTH = 1 << 15  # values of a row


@triton.jit(do_not_specialize=["x_row", "residual_row", "normed_row", "summed_row"])
def add_rms_norm_kernel(  # noqa: D103
    x_ptr,
    residual_ptr,
    x_weight_ptr,
    weight_ptr,
    normed_ptr,
    summed_ptr,
    eps,
    x_row,
    residual_row,
    normed_row,
    summed_row,
    STRIDE_UNIT: tl.constexpr,
    H: tl.constexpr,
    H_PADDED: tl.constexpr,
    STYLE: tl.constexpr,
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * STRIDE_UNIT
    o_h = tl.arange(0, H_PADDED)
    m_h = o_h < H
    b_y = tl.load(x_ptr + row * x_row + o_h, mask=m_h, other=0.0).to(tl.float32)
    if x_weight_ptr is not None:
        b_weight = tl.load(x_weight_ptr + o_h, mask=m_h, other=0.0).to(tl.float32)
        b_z = b_y * inverse_rms(tl.sum(b_y * b_y), eps, H)
        b_y = weighted(b_z, b_weight, DTYPE, STYLE).to(DTYPE).to(tl.float32)
    if residual_ptr is not None:
        p_residual = residual_ptr + row * residual_row + o_h
        b_y += tl.load(p_residual, mask=m_h, other=0.0).to(tl.float32)
        b_summed = b_y.to(DTYPE)
        tl.store(summed_ptr + row * summed_row + o_h, b_summed, mask=m_h)
        b_y = b_summed.to(tl.float32)
    b_weight = tl.load(weight_ptr + o_h, mask=m_h, other=0.0).to(tl.float32)
    b_z = b_y * inverse_rms(tl.sum(b_y * b_y), eps, H)
    b_normed = weighted(b_z, b_weight, DTYPE, STYLE)
    tl.store(normed_ptr + row * normed_row + o_h, b_normed, mask=m_h)


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    x_weight: Tensor | None,
    weight: Tensor,
    normed: Tensor,
    summed: Tensor | None,
    eps: float,
    style: str,
) -> None:
    """Write normed [T, H] and, with a residual, summed [T, H].

    Raises `ValueError` that names the argument when shapes, dtypes or strides do not fit.
    """
    _check(x, residual, x_weight, weight, normed, summed)
    check_formula("style", style, STYLES)
    rows, width = x.shape
    if rows == 0:
        return
    strides = [
        0 if tensor is None else tensor.stride(0) for tensor in (x, residual, normed, summed)
    ]
    unit = stride_unit(strides)
    add_rms_norm_kernel[(rows,)](
        x,
        residual,
        x_weight,
        weight,
        normed,
        summed,
        eps,
        *(stride // unit for stride in strides),
        **norm_constants(width, unit, style),
    )


def norm_constants(width: int, unit: int, style: str) -> dict[str, int | str | bool]:
    """Compile-time arguments and options."""
    padded = int(triton.next_power_of_2(width))
    return {
        "STRIDE_UNIT": unit,
        "H": width,
        "H_PADDED": padded,
        "STYLE": style,
        "num_warps": min(16, max(4, padded // 1024)),
        "enable_fp_fusion": False,  # round where the unfused model rounds
    }


def _check(
    x: Tensor,
    residual: Tensor | None,
    x_weight: Tensor | None,
    weight: Tensor,
    normed: Tensor,
    summed: Tensor | None,
) -> None:
    if x.dim() != 2 or not 1 <= x.shape[1] <= MAX_WIDTH:
        raise ValueError(f"x: wanted [T, H], H from 1 to {MAX_WIDTH}, got shape {tuple(x.shape)}")
    if (residual is None) != (summed is None):
        raise ValueError("summed: wanted together with residual, or neither")
    rows = {"x": x, "residual": residual, "normed": normed, "summed": summed}
    weights = {"x_weight": x_weight, "weight": weight}
    for tensors, shape in ((rows, x.shape), (weights, x.shape[1:])):
        for name, tensor in tensors.items():
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{name}: wanted shape {tuple(shape)}, got {tuple(tensor.shape)}")
    check_rows(x.dtype, **{name: tensor for name, tensor in rows.items() if tensor is not None})
    check_contiguous(x.dtype, **{n: tensor for n, tensor in weights.items() if tensor is not None})
