"""`gated_mul` against its float64 oracle and the unfused formula: on the CPU, and in Triton."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from graphattn.kernels.gated_mul import gated_mul
from graphattn.kernels.gated_mul_ref import gated_mul_ref
from tests.kernels.fused_case import (
    BF16,
    FP16,
    FP32,
    NAN,
    Run,
    assert_within,
    draw,
    each_implementation,
    roundoff,
    run_cpu,
    run_triton,
)

ACTIVATIONS = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


@each_implementation
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_product_with_the_activation(dtype: torch.dtype, activation: str, run: Run) -> None:
    """Halves of one projection, into a slice of a wider tensor whose rest stays.

    Two roundings; in fp32 the activation errs by a few parts of what it is multiplied with.
    """
    gate_up = 3 * draw(3, 2 * 1100, dtype=dtype)
    gate_up[0, :4] = torch.tensor([0.0, 60.0, -60.0, -9.0]).to(dtype)
    gate, up = gate_up.chunk(2, 1)
    out = torch.full((3, 1110), NAN, dtype=dtype)
    run("gated_mul", gate, up, out[:, 5:1105], activation)
    wanted = gated_mul_ref(gate, up, activation)
    largest = (gate.double() * up.double()).abs()
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    bound = 2 * roundoff(dtype, run) * wanted.abs() + 2.0**-21 * largest
    assert_within(out[:, 5:1105], wanted, bound + least * (1 + up.double().abs()))
    assert out[:, :5].isnan().all()
    assert out[:, 1105:].isnan().all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("run", "dtype"), [(run_cpu, FP32), (run_cpu, BF16), (run_cpu, FP16), (run_triton, FP16)]
)
def test_it_rounds_where_the_unfused_model_rounds(
    run: Run, dtype: torch.dtype, activation: str
) -> None:
    """Bit for bit on the CPU. A kernel's exp differs, which shows in few places of fp16; without
    the rounding of the activation they are a fourth."""
    gate, up = draw(2, 5, 200, dtype=dtype)
    out = torch.empty_like(gate)
    run("gated_mul", gate, up, out, activation)
    off = out != ACTIVATIONS[activation](gate) * up
    assert off.double().mean() <= (0 if run is run_cpu else 0.02)


@each_implementation
def test_the_output_may_be_an_input_and_nan_stays_in_place(run: Run) -> None:
    gate, up = draw(2, 3, 50)
    gate[1, 7] = NAN
    wanted = torch.empty_like(gate)
    run("gated_mul", gate, up, wanted, "silu")
    assert torch.equal(wanted.isnan().nonzero(), torch.tensor([[1, 7]]))
    for position in range(2):
        args = [gate.clone(), up.clone()]
        run("gated_mul", *args, args[position], "silu")
        assert torch.equal(args[position].nan_to_num(), wanted.nan_to_num())
    run("gated_mul", gate[:0], up[:0], wanted[:0], "silu")


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "flat": ("gate", {"gate": torch.zeros(16)}),
    "another width": ("up", {"up": torch.zeros(3, 15)}),
    "another dtype": ("up", {"up": torch.zeros(3, 16).half()}),
    "columns first": ("out", {"out": torch.zeros(16, 3).T}),
    "fewer rows": ("out", {"out": torch.zeros(2, 16)}),
    "unknown": ("activation", {"activation": "relu"}),
}


@pytest.mark.parametrize(("name", "change"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named(name: str, change: dict[str, Any]) -> None:
    args = {key: torch.zeros(3, 16) for key in ("gate", "up", "out")} | {"activation": "silu"}
    with pytest.raises(ValueError, match=f"^{name}: wanted"):
        gated_mul(**args | change)
