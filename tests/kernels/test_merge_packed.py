"""`merge_packed` against the float64 oracle: on the CPU, and in Triton."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from graphattn.kernels import ops
from graphattn.kernels.merge_packed import merge_packed as merge_triton
from graphattn.kernels.merge_packed_ref import merge_packed_ref
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


def message_of(outs: Tensor, lses: Tensor) -> Tensor:
    """outs [W, n, D] and lses [W, n] as one message [W, n, D + 4 / itemsize]."""
    return torch.cat([outs, lses.contiguous()[..., None].view(outs.dtype)], -1)


def merge(
    run: Run, message: Tensor, dim: int, sinks: Tensor | None = None, first: int = 0
) -> Tensor:
    merged = torch.full((message.shape[1], dim), NAN, dtype=message.dtype)
    run("merge_packed", message, sinks, merged, first)
    return merged


CASES = {
    "one rank": (1, 3, 4, 16, FP32),
    "odd heads, bf16": (3, 5, 9, 64, BF16),
    "fp16": (2, 2, 6, 128, FP16),
    "8 ranks": (8, 2, 9, 256, BF16),
    "odd head size": (4, 3, 5, 7, FP32),
    "several programs": (2, 60, 3, 96, BF16),
}


@each_implementation
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_the_oracle(case: tuple, sinks: bool, run: Run) -> None:
    """Output is planted with NaN, and so are the messages' rows of empty shards: neither shows."""
    outs, lses = (x.flatten(1, 2) for x in draw_partials(*case))
    sink = draw_sinks(case[2]) if sinks else None
    message = message_of(outs, lses)
    for first in (0, 4):  # where this rank's rows begin, in the middle of a token's heads or not
        got = merge(run, message, case[3], sink, first)
        wanted = merge_packed_ref(message, sink, first)
        assert_near(got, wanted, outs, lses, run)
        assert (got[wanted == 0] == 0).all()


@each_implementation
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_all_ranks_empty_is_exactly_zero(sinks: bool, run: Run) -> None:
    message = message_of(torch.full((4, 5, 8), NAN, dtype=BF16), torch.full((4, 5), -INF))
    got = merge(run, message, 8, draw_sinks(5) if sinks else None)
    assert torch.equal(got, torch.zeros(5, 8, dtype=BF16))


@each_implementation
def test_one_rank_that_sees_gives_its_output_exactly(run: Run) -> None:
    """Whatever its LSE: exp(lse - lse) is 1."""
    outs, lses = torch.full((4, 3, 8), NAN), torch.full((4, 3), -INF)
    outs[2] = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    lses[2] = torch.tensor([-1e4, 0.3, 1e4])
    assert torch.equal(merge(run, message_of(outs, lses), 8), outs[2])


@each_implementation
def test_the_lse_is_read_in_full_precision(run: Run) -> None:
    """Two LSEs that bf16 cannot tell apart: their weights differ by what fp32 says."""
    lses = torch.tensor([[16.0], [16.03]])
    assert lses[0].bfloat16() == lses[1].bfloat16()
    outs = torch.tensor([1.0, -1.0], dtype=BF16).view(2, 1, 1).expand(2, 1, 8)
    got = merge(run, message_of(outs, lses), 8).double()
    difference = float(lses[1].double() - lses[0].double())
    wanted = torch.full((1, 8), float(np.tanh(-difference / 2)), dtype=torch.float64)
    torch.testing.assert_close(got, wanted, atol=2.0**-18, rtol=2.0**-7)


@each_implementation
def test_a_poisoned_row_stays_visible_and_alone(run: Run) -> None:
    """A NaN LSE is no empty shard; of one rank or of all, its row is NaN, and no other is."""
    outs, lses = torch.ones(2, 4, 8), torch.zeros(2, 4)
    lses[1, 1] = NAN
    lses[:, 3] = NAN
    nan = merge(run, message_of(outs, lses), 8).isnan()
    assert nan[[1, 3]].all()
    assert int(nan.sum()) == 2 * 8


@each_implementation
def test_an_empty_row_of_a_foreign_kernel_has_to_be_mapped(run: Run) -> None:
    """+inf for an empty row gives NaN, never a plausible number: its adapter maps it to -inf."""
    outs = torch.full((2, 1, 8), 0.75)
    with np.errstate(invalid="ignore"):  # the interpreter's inf - inf
        foreign = torch.tensor([[2.5], [INF]])
        assert merge(run, message_of(outs, foreign), 8).isnan().all()
    mapped = torch.tensor([[2.5], [-INF]])
    assert torch.equal(merge(run, message_of(outs, mapped), 8), outs[0])


WRONG = {
    "message": lambda a: a | {"message": a["message"][..., :8].contiguous()},
    "sinks": lambda a: a | {"sinks": a["sinks"][:0]},
    "merged": lambda a: a | {"merged": a["merged"][1:]},
}
WRONG_LAYOUTS = {
    "message": lambda a: a | {"message": a["message"].mT.contiguous().mT},
    "sinks": lambda a: a | {"sinks": a["sinks"].double()},
    "merged": lambda a: a | {"merged": a["merged"].half()},
}


@pytest.mark.parametrize("wrong", [WRONG, WRONG_LAYOUTS], ids=["shapes", "dtypes and strides"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name: str, wrong: dict) -> None:
    message = message_of(torch.zeros(2, 5, 8), torch.zeros(2, 5))
    args = {"message": message, "sinks": draw_sinks(5), "merged": torch.zeros(5, 8)}
    with pytest.raises(ValueError, match=f"^{name}: wanted"):
        merge_triton(*wrong[name](args).values(), 0)


@pytest.mark.gpu
def test_op_on_cuda() -> None:
    outs, lses = (x.flatten(1, 2).to(DEVICE) for x in draw_partials(4, 512, 32, 128, BF16))
    merged = torch.full((512 * 32, 128), NAN, dtype=BF16, device=DEVICE)
    ops.merge_packed(message_of(outs, lses), None, merged, 0)
    weights = torch.softmax(lses.double(), 0).nan_to_num(0.0)[..., None]
    wanted = (outs.double().nan_to_num(0.0) * weights).sum(0)
    torch.testing.assert_close(merged.double(), wanted, atol=1e-4, rtol=2.0**-8)
