"""Latent attention that multiplies with W_UV as it merges splits: on the CPU, and in Triton."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from graphattn.kernels import ops
from graphattn.kernels.attend_latent import attend_latent
from tests.kernels.attend_case import Budget, Row, Setting
from tests.kernels.latent_case import Latent, LatentCase, build

BF16, FP16 = torch.bfloat16, torch.float16
DRAFTS = Setting(decode_query_len=3, tail=5)
ROWS = [
    Row(40, 3, seed=10),
    Row(0, 9, prefill=True, tokens=6, seed=20),
    Row(0, 0, padding=True),
    Row(17, 3, tokens=1, seed=30),
]
DECODE = [row for row in ROWS if not row.prefill]

both = pytest.mark.parametrize("attend", [ops.attend_latent, attend_latent], ids=["cpu", "triton"])
GEOMETRIES = {
    "miniature": (Latent(4, 32, 16, DRAFTS), 12, ROWS),
    "no power of two": (Latent(3, 48, 24, replace(DRAFTS, page_size=32, dtype=FP16)), 33, ROWS),
    "smaller than a dot": (Latent(1, 8, 4, replace(DRAFTS, dtype=BF16)), 5, ROWS),
    "several blocks": (Latent(2, 160, 16, DRAFTS), 20, DECODE),
    "many rows": (Latent(1, 16, 8, DRAFTS), 16, [Row(n, 1, seed=n) for n in range(18)]),
}


def expand(attend: Any, case: LatentCase, width: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """up [Hq, V, Dv], part of a wider projection, and expanded [T, Hq, V], which was NaN."""
    tokens, heads, dim = case.args["out"].shape
    generator = torch.Generator().manual_seed(seed)
    projection = torch.randn(heads, width + 3, dim, generator=generator)
    up = projection.to(case.args["out"])[:, 3:]
    expanded = torch.full((tokens, heads, width), torch.nan).to(up)
    attend(*case.args.values(), up, expanded)
    return up, expanded


@both
@pytest.mark.parametrize(("latent", "width", "rows"), GEOMETRIES.values(), ids=GEOMETRIES)
def test_values_are_expanded(latent: Latent, width: int, rows: list[Row], attend: Any) -> None:
    """What `out` may err goes through the product, which is summed in fp32 and rounded once."""
    case = build(rows, latent)
    if rows is DECODE:
        case.args["prefill_items"] = case.args["prefill_count"] = None
    up, expanded = expand(attend, case, width)
    out, _ = case.oracle()
    wanted = torch.einsum("thd,hvd->thv", out, up.double().cpu())
    entries = case.args["pool"].float()
    budget = Budget.for_entries(
        case.setting, case.args, keys=entries, values=entries[..., : latent.value_dim]
    )
    of_out = budget.out + budget.out_relative * out.abs()
    sizes = up.double().abs().cpu()
    bound = torch.einsum("thd,hvd->thv", of_out, sizes)
    terms = torch.einsum("thd,hvd->thv", out.abs(), sizes)
    bound += (latent.value_dim + 8) * 2.0**-23 * terms + torch.finfo(up.dtype).eps * wanted.abs()
    assert bool(((expanded.double().cpu() - wanted).abs() <= bound).all())
    empty = (case.args["visible_end"] <= case.args["visible_start"]).cpu()
    assert empty.any()
    assert (expanded.cpu()[empty] == 0).all()


def test_bit_for_bit_as_two_operations_on_the_cpu() -> None:
    case, apart = (build(ROWS, Latent(3, 32, 16, DRAFTS)) for _ in range(2))
    up, expanded = expand(ops.attend_latent, case, 20)
    ops.attend_latent(*apart.args.values())
    wanted = torch.bmm(apart.args["out"].transpose(0, 1), up.transpose(1, 2)).transpose(0, 1)
    assert torch.equal(expanded, wanted)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's maximum
def test_a_poisoned_row_stays_alone() -> None:
    """Its places share a block with others."""
    case = build(ROWS, Latent(2, 32, 16, DRAFTS))
    case.args["q"][case.row_places[3]] = torch.nan
    _, expanded = expand(attend_latent, case, 16)
    places = expanded.isnan().any(-1).any(-1).nonzero().flatten().tolist()
    assert places == [case.row_places[3].start]


WRONG = {
    "alone": ("expanded", None),
    "other heads": ("up", torch.zeros(3, 16, 32)),
    "another dtype": ("up", torch.zeros(2, 16, 32).half()),
    "flat": ("up", torch.zeros(32)),
    "columns first": ("up", torch.zeros(2, 32, 16).mT),
    "narrow": ("expanded", torch.zeros(1, 2, 15)),
}


@pytest.mark.parametrize(("name", "value"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named(name: str, value: Tensor | None) -> None:
    case = build([Row(4, 1, seed=1)], Latent(2, 32, 16, Setting()))
    args = {"up": torch.zeros(2, 16, 32), "expanded": torch.zeros(1, 2, 16)} | {name: value}
    with pytest.raises(ValueError, match=f"^{name}: wanted"):
        attend_latent(**case.args, **args)
