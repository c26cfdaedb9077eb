"""What tests of the ops fused within a layer share: both implementations, the unfused formulas, and
what a result may err."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphattn.kernels import fused_ops
from graphattn.kernels.absorb_query import absorb_query
from graphattn.kernels.add_rms_norm import add_rms_norm
from graphattn.kernels.gated_mul import gated_mul
from graphattn.kernels.latent_norm_write import latent_norm_write
from graphattn.kernels.rope_write import rope_write
from tests.kernels.implementations import DEVICE, Run, implementations

TRITON = {
    "add_rms_norm": add_rms_norm,
    "rope_write": rope_write,
    "latent_norm_write": latent_norm_write,
    "absorb_query": absorb_query,
    "gated_mul": gated_mul,
}
NAN = torch.nan
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
STYLES = ("rounded", "wide", "offset")
LAYOUTS = {"halves": (False, False), "pairs": (True, True), "pairs to halves": (True, False)}

PAGES, PAGE_SIZE = 3, 6
SLOTS = torch.tensor([PAGE_SIZE, -1, PAGES * PAGE_SIZE - 1, 0, -1])  # of places that write to them
WRITTEN = SLOTS >= 0

run_cpu, run_triton = implementations(fused_ops, TRITON)
each_implementation = pytest.mark.parametrize("run", [run_cpu, run_triton], ids=["cpu", "triton"])


def draw(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def roundoff(dtype: torch.dtype, run: Run) -> float:
    """Largest relative error of one rounding; the interpreter cuts bf16 off instead."""
    cut = dtype == BF16 and run is run_triton and DEVICE == "cpu"
    return torch.finfo(dtype).eps * (1.0 if cut else 0.5)


def norm_error(dtype: torch.dtype, width: int, style: str, run: Run) -> float:
    """Largest relative error of a normed value.

    One rounding of the result, one more of z where the style has it, and in fp32 a sum of `width`
    squares, of which half the relative error remains after the root, and 8 more operations.
    """
    rounds = 2 if style == "rounded" else 1
    return rounds * roundoff(dtype, run) + (width / 2 + 8) * 2.0**-24


def assert_within(got: Tensor, wanted: Tensor, bound: Tensor) -> None:
    """Every value lies within `bound` (>= 0, float64) of the oracle's."""
    excess = (got.double() - wanted).abs() - bound
    assert bool((excess <= 0).all()), f"largest excess {float(excess.nan_to_num(torch.inf).max())}"


def unfused_norm(x: Tensor, weight: Tensor, eps: float, style: str) -> Tensor:
    """As the modules of models write it."""
    wide = x.float()
    z = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if style == "rounded":
        return weight * z.to(x.dtype)
    return (z * (weight.float() + (style == "offset"))).to(x.dtype)


def unfused_rotation(
    x: Tensor, cos: Tensor, sin: Tensor, *, pairs_in: bool, pairs_out: bool
) -> Tensor:
    """As the functions of models write it, with angles for every value of a head."""
    rotated = 2 * cos.shape[1]
    passing, x = x[..., rotated:], x[..., :rotated]
    if pairs_in and not pairs_out:
        x, pairs_in = torch.cat([x[..., ::2], x[..., 1::2]], -1), False
    if pairs_in:
        cos, sin = (angle.repeat_interleave(2, -1)[:, None] for angle in (cos, sin))
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    else:
        cos, sin = (torch.cat([angle, angle], -1)[:, None] for angle in (cos, sin))
        turned = torch.cat([-x[..., rotated // 2 :], x[..., : rotated // 2]], -1)
    return torch.cat([(x * cos + turned * sin).to(passing.dtype), passing], -1)


def magnitudes(x: Tensor, cos: Tensor, sin: Tensor, *, pairs_in: bool, pairs_out: bool) -> Tensor:
    """|a cos| + |b sin| where a rotation has a cos - b sin, and likewise for b: float64."""
    a, b = _halves(x.double().abs()[..., : 2 * cos.shape[1]], pairs_in)
    c, s = (angle.double().abs()[:, None] for angle in (cos, sin))
    sizes = x.double().abs().clone()
    for target, values in zip(
        _halves(sizes[..., : 2 * cos.shape[1]], pairs_out),
        (a * c + b * s, b * c + a * s),
        strict=True,
    ):
        target.copy_(values)
    return sizes


def _halves(x: Tensor, pairs: bool) -> tuple[Tensor, Tensor]:
    return (x[..., ::2], x[..., 1::2]) if pairs else x.chunk(2, -1)
