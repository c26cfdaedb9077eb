"""`add_rms_norm` against its float64 oracle and the unfused formula: on the CPU, and in Triton."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphattn.kernels.add_rms_norm import add_rms_norm
from graphattn.kernels.add_rms_norm_ref import add_rms_norm_ref
from graphattn.kernels.rms_norm_ref import rms_norm_ref
from tests.kernels.fused_case import (
    BF16,
    FP16,
    FP32,
    NAN,
    STYLES,
    Run,
    assert_within,
    draw,
    each_implementation,
    norm_error,
    roundoff,
    run_cpu,
    run_triton,
    unfused_norm,
)

EPS = 1e-3


def inputs(
    rows: int, width: int, dtype: torch.dtype, *, sandwich: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """x, residual, x_weight, weight; rows of very different size, one of zeros."""
    x, residual = draw(rows, width, dtype=dtype, seed=1), draw(rows, width, dtype=dtype, seed=2)
    x *= torch.tensor([1.0, 30.0, 0.01] * rows)[:rows, None].to(dtype)
    x[-1] = residual[-1] = 0.0
    x_weight = draw(width, dtype=dtype, seed=3) if sandwich else None
    return x, residual, x_weight, draw(width, dtype=dtype, seed=4)


@each_implementation
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("sandwich", [False, True], ids=["", "sandwich"])
@pytest.mark.parametrize(
    ("rows", "width", "dtype"), [(5, 72, FP32), (3, 200, BF16), (4, 65, FP16)], ids=str
)
def test_sum_and_norm(
    rows: int, width: int, dtype: torch.dtype, sandwich: bool, style: str, run: Run
) -> None:
    """The norm is judged by the sum that was written, which is rounded."""
    x, residual, x_weight, weight = inputs(rows, width, dtype, sandwich=sandwich)
    normed, summed = (torch.full((rows, width), NAN, dtype=dtype) for _ in range(2))
    run("add_rms_norm", x, residual, x_weight, weight, normed, summed, EPS, style)
    error = norm_error(dtype, width, style, run)
    _, exact = add_rms_norm_ref(x, residual, x_weight, weight, EPS, style)
    of_y = (exact - residual.double()).abs() * error if sandwich else torch.zeros_like(exact)
    assert_within(summed, exact, (exact.abs() + of_y) * roundoff(dtype, run) + of_y)
    wanted = rms_norm_ref(summed, weight, EPS, style)
    assert_within(normed, wanted, wanted.abs() * error + torch.finfo(dtype).tiny)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("run", "dtype"), [(run_cpu, FP32), (run_cpu, BF16), (run_cpu, FP16), (run_triton, FP16)]
)
def test_it_rounds_where_the_unfused_model_rounds(run: Run, dtype: torch.dtype, style: str) -> None:
    """Bit for bit on the CPU. A kernel sums in another order, which shows in few places of fp16;
    those of another style are a third."""
    x, residual, x_weight, weight = inputs(7, 96, dtype, sandwich=True)
    normed, summed = torch.empty_like(x), torch.empty_like(x)
    run("add_rms_norm", x, residual, x_weight, weight, normed, summed, EPS, style)
    wanted = residual + unfused_norm(x, x_weight, EPS, style)
    off = (summed != wanted) | (normed != unfused_norm(wanted, weight, EPS, style))
    assert off.double().mean() <= (0 if run is run_cpu else 0.02)


@each_implementation
def test_without_a_residual_rows_of_wider_tensors(run: Run) -> None:
    """The low-rank half of a query, out of and into a wider tensor whose rest stays."""
    wide, weight = draw(4, 50, seed=1), draw(24, seed=2)
    out = torch.full((4, 30), NAN)
    run("add_rms_norm", wide[:, 10:34], None, None, weight, out[:, 3:27], None, EPS, "rounded")
    wanted, _ = add_rms_norm_ref(wide[:, 10:34], None, None, weight, EPS, "rounded")
    assert_within(out[:, 3:27], wanted, wanted.abs() * norm_error(FP32, 24, "rounded", run))
    assert out[:, :3].isnan().all()
    assert out[:, 27:].isnan().all()


@each_implementation
def test_outputs_may_be_inputs(run: Run) -> None:
    x, residual, x_weight, weight = inputs(5, 40, BF16, sandwich=True)
    apart = torch.empty_like(x), torch.empty_like(x)
    run("add_rms_norm", x, residual, x_weight, weight, *apart, EPS, "offset")
    for target in ("residual", "x"):
        a, b = x.clone(), residual.clone()
        summed = b if target == "residual" else a
        normed = a if target == "residual" else torch.empty_like(x)
        run("add_rms_norm", a, b, x_weight, weight, normed, summed, EPS, "offset")
        assert torch.equal(normed, apart[0])
        assert torch.equal(summed, apart[1])


@each_implementation
def test_a_poisoned_row_stays_alone(run: Run) -> None:
    x, residual, _, weight = inputs(4, 33, FP32, sandwich=False)
    x[2] = NAN
    normed, summed = torch.empty_like(x), torch.empty_like(x)
    run("add_rms_norm", x, residual, None, weight, normed, summed, EPS, "rounded")
    for result in (normed, summed):
        assert torch.equal(result.isnan().all(1), torch.tensor([False, False, True, False]))
        assert int(result.isnan().sum()) == 33
    run("add_rms_norm", *(t[:0] for t in (x, residual)), None, weight, x[:0], x[:0], EPS, "wide")


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "flat": ("x", {"x": torch.zeros(16)}),
    "too wide": ("x", {"x": torch.zeros(1, 1).expand(3, 1 << 16)}),
    "columns first": ("x", {"x": torch.zeros(16, 3).T}),
    "alone": ("summed", {"residual": None}),
    "another width": ("residual", {"residual": torch.zeros(3, 15)}),
    "another dtype": ("normed", {"normed": torch.zeros(3, 16).half()}),
    "a row of weights": ("weight", {"weight": torch.zeros(1, 16)}),
    "wide weight": ("x_weight", {"x_weight": torch.zeros(16).double()}),
    "unknown": ("style", {"style": "gemma"}),
}


@pytest.mark.parametrize(("name", "change"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named(name: str, change: dict[str, Any]) -> None:
    rows = {key: torch.zeros(3, 16) for key in ("x", "residual", "normed", "summed")}
    args = rows | {"x_weight": None, "weight": torch.zeros(16), "eps": EPS, "style": "wide"}
    with pytest.raises(ValueError, match=f"^{name}: wanted"):
        add_rms_norm(**args | change)
