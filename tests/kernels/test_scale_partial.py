"""`scale_partial` against the float64 oracle: on the CPU, and in Triton."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from graphattn.kernels import ops
from graphattn.kernels.scale_partial import scale_partial as scale_triton
from graphattn.kernels.scale_partial_ref import scale_partial_ref
from tests.kernels.partials_case import (
    DEVICE,
    INF,
    NAN,
    Run,
    assert_near,
    draw_partials,
    draw_sinks,
    each_implementation,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def scale(
    run: Run, out: Tensor, lse: Tensor, lses: Tensor, sinks: Tensor | None = None, slices: int = 1
) -> Tensor:
    tokens, heads, dim = out.shape
    scaled = torch.full((slices, tokens, heads // slices, dim), NAN, dtype=out.dtype)
    run("scale_partial", out, lse, lses, sinks, scaled)
    return scaled


CASES = {
    "one rank": (1, 3, 4, 16, FP32, 1),
    "odd heads, bf16": (3, 5, 9, 64, BF16, 1),
    "heads over ranks": (4, 3, 12, 40, FP32, 4),
    "heads over ranks, fp16": (2, 2, 6, 128, FP16, 2),
    "8 ranks": (8, 2, 8, 256, BF16, 8),
    "odd head size": (2, 3, 5, 7, FP32, 1),
    "several programs": (2, 60, 3, 96, BF16, 3),
}


@each_implementation
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_ranks_term(case: tuple, sinks: bool, run: Run) -> None:
    """Output is planted with NaN, `out` is NaN where its shard is empty: neither shows."""
    *sizes, slices = case
    outs, lses = draw_partials(*sizes)
    sink = draw_sinks(outs.shape[2]) if sinks else None
    for out, lse in zip(outs, lses, strict=True):
        got = scale(run, out, lse, lses, sink, slices)
        wanted = scale_partial_ref(out, lse, lses, sink, slices)
        assert_near(got, wanted, outs, lses, run)
        assert (got[wanted == 0] == 0).all()


@each_implementation
def test_an_empty_rank_adds_exactly_nothing(run: Run) -> None:
    """Lengths [0, 2] with queries [1, 4] and 2 padded tokens, over two ranks, the second empty.

    Seen elsewhere: empty ranks left their LSE unwritten, and the merge of all was NaN.
    """
    seen = torch.tensor([False, True, True, True, True, False, False])
    lses = torch.full((2, 7, 9), -INF)
    lses[0, seen] = 0.5
    outs = torch.full((2, 7, 9, 16), NAN)
    outs[0, seen] = 1.25
    first, second = (scale(run, outs[r], lses[r], lses)[0] for r in range(2))
    assert torch.equal(first, 1.25 * seen[:, None, None].expand(7, 9, 16))
    assert torch.equal(second, torch.zeros(7, 9, 16))


@each_implementation
def test_far_apart_and_large_lses(run: Run) -> None:
    """Neither exp overflows, nor does a vanishing weight turn into NaN."""
    lses = torch.tensor([1e4, -1e4, 88.0, -INF]).view(4, 1, 1)
    out = torch.ones(1, 1, 8)
    sums = [float(scale(run, out, lses[r], lses).sum()) for r in range(4)]
    assert sums == [8.0, 0.0, 0.0, 0.0]


@each_implementation
def test_a_poisoned_row_stays_visible_and_alone(run: Run) -> None:
    """NaN of a request's own keys must reach its logits, not vanish, and touch no other row."""
    outs, lses = draw_partials(3, 4, 2, 16, FP32)
    lses[:, 1:] = lses[:, 1:].nan_to_num(neginf=0.5)
    outs = outs.nan_to_num(0.0)
    lses[1, 2, 1] = NAN
    for out, lse in zip(outs, lses, strict=True):
        nan = scale(run, out, lse, lses)[0].isnan()
        assert nan[2, 1].all()
        assert int(nan.sum()) == 16


@each_implementation
def test_an_empty_row_of_a_foreign_kernel_has_to_be_mapped(run: Run) -> None:
    """Kernels of others return LSE = +inf, or NaN, for an empty row; here it is -inf.

    Unmapped it gives NaN, never a plausible number; mapped by its adapter it adds nothing.
    """
    outs = torch.full((2, 1, 1, 8), 0.75)
    foreign = torch.tensor([2.5, INF]).view(2, 1, 1)
    with np.errstate(invalid="ignore"):  # the interpreter's inf - inf
        assert scale(run, outs[1], foreign[1], foreign).isnan().all()
    empty = torch.tensor([False, True]).view(2, 1, 1)  # from the lengths, which adapters know
    lses = foreign.masked_fill(empty, -INF)
    assert torch.equal(scale(run, outs[0], lses[0], lses), outs[:1])
    assert torch.equal(scale(run, outs[1], lses[1], lses), torch.zeros(1, 1, 1, 8))


WRONG = {
    "out": lambda a: a | {"out": a["out"][0]},
    "lse": lambda a: a | {"lse": a["lse"][1:]},
    "lses": lambda a: a | {"lses": a["lses"][:, 1:]},
    "sinks": lambda a: a | {"sinks": a["sinks"][1:]},
    "scaled": lambda a: a | {"scaled": a["scaled"].view(1, 3, 5, 16)},
}
WRONG_LAYOUTS = {
    "out": lambda a: a | {"out": a["out"].mT.contiguous().mT},
    "lse": lambda a: a | {"lse": a["lse"].double()},
    "lses": lambda a: a | {"lses": a["lses"].half()},
    "sinks": lambda a: a | {"sinks": a["sinks"].double()},
    "scaled": lambda a: a | {"scaled": a["scaled"].half()},
}


@pytest.mark.parametrize("wrong", [WRONG, WRONG_LAYOUTS], ids=["shapes", "dtypes and strides"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name: str, wrong: dict) -> None:
    outs, lses = draw_partials(2, 3, 10, 8, FP32)
    args = {"out": outs[0], "lse": lses[0], "lses": lses, "sinks": draw_sinks(10)}
    args["scaled"] = torch.zeros(1, 3, 10, 8)
    with pytest.raises(ValueError, match=f"^{name}: wanted"):
        scale_triton(*wrong[name](args).values())


@pytest.mark.gpu
def test_op_on_cuda() -> None:
    outs, lses = (x.to(DEVICE) for x in draw_partials(4, 512, 32, 128, BF16))
    terms = torch.full((4, 4, 512, 8, 128), NAN, dtype=BF16, device=DEVICE)
    for out, lse, scaled in zip(outs, lses, terms, strict=True):
        ops.scale_partial(out, lse, lses, None, scaled)
    weights = torch.softmax(lses.double(), 0).nan_to_num(0.0)[..., None]
    wanted = (outs.double().nan_to_num(0.0) * weights).unflatten(2, (4, 8)).permute(0, 2, 1, 3, 4)
    torch.testing.assert_close(terms.double(), wanted, atol=1e-4, rtol=2.0**-8)
