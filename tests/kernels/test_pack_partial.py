"""`pack_partial` bit for bit against its oracle: on the CPU, and in Triton."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphattn.kernels import ops
from graphattn.kernels.message import lse_column
from graphattn.kernels.pack_partial import pack_partial as pack_triton
from graphattn.kernels.pack_partial_ref import pack_partial_ref
from tests.kernels.partials_case import (
    DEVICE,
    INF,
    NAN,
    Run,
    as_bytes,
    draw_partials,
    each_implementation,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def empty_message(out: Tensor, ranks: int) -> Tensor:
    tokens, heads, dim = out.shape
    rows = -(-tokens * heads // ranks)
    return torch.full((ranks, rows, dim + 4 // out.element_size()), NAN, dtype=out.dtype)


def pack(run: Run, out: Tensor, lse: Tensor, ranks: int, by_head: bool = False) -> Tensor:
    message = empty_message(out, ranks)
    run("pack_partial", out, lse, message, by_head)
    return message


CASES = {
    "one rank": (1, 3, 4, 16, FP32, False),
    "rows left over": (4, 3, 9, 64, BF16, False),
    "a rank without rows": (8, 1, 9, 40, FP32, False),
    "fewer rows than ranks": (8, 1, 5, 16, FP16, False),
    "by head": (3, 5, 9, 64, BF16, True),
    "by head, one each": (4, 2, 4, 128, FP16, True),
    "by head, fp32, odd head size": (2, 3, 6, 7, FP32, True),
    "several programs": (2, 60, 3, 96, BF16, False),
    "several programs by head": (3, 40, 6, 80, BF16, True),
}


@each_implementation
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_the_oracle_bit_for_bit(case: tuple, run: Run) -> None:
    ranks, tokens, heads, dim, dtype, by_head = case
    outs, lses = draw_partials(1, tokens, heads, dim, dtype)
    wanted = empty_message(outs[0], ranks)
    pack_partial_ref(outs[0], lses[0], wanted, by_head)
    got = pack(run, outs[0], lses[0], ranks, by_head)
    assert torch.equal(as_bytes(got), as_bytes(wanted))


@each_implementation
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_the_lse_survives_exactly(dtype: torch.dtype, run: Run) -> None:
    """Seen elsewhere: the LSE was sent as bf16 and read back as fp32.

    Values whose halves are NaN, zero or denormal as 16-bit floats, and those that bf16 would round.
    """
    bits = [
        0x3F80_0001,
        0x4049_0FDB,
        0x7F7F_FFFF,
        0x0000_0001,
        0x8000_0000,
        0x3F80_FFFF,
        0x427C_7C01,
    ]
    lse = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
    lse = torch.cat([lse, torch.tensor([-INF, 12.345678])]).view(1, 9)
    message = pack(run, torch.zeros(1, 9, 6, dtype=dtype), lse, 3)
    assert torch.equal(as_bytes(lse_column(message, 6)), as_bytes(lse.view(3, 3)))


@each_implementation
def test_rows_past_the_end_are_empty(run: Run) -> None:
    """Nine rows over four ranks: the last message has none left over, but three empty ones."""
    message = pack(run, torch.ones(1, 9, 8), torch.ones(1, 9), 4)
    assert torch.equal(message.view(12, 9)[:9], torch.ones(9, 9))
    assert torch.equal(message[3, :, :8], torch.zeros(3, 8))
    assert (message[3, :, 8] == -INF).all()


WRONG = {
    "out": lambda a: a | {"out": a["out"][0]},
    "lse": lambda a: a | {"lse": a["lse"][1:]},
    "message": lambda a: a | {"message": a["message"][:, 1:].contiguous()},
}
WRONG_LAYOUTS = {
    "out": lambda a: a | {"out": a["out"].mT.contiguous().mT},
    "lse": lambda a: a | {"lse": a["lse"].double()},
    "message": lambda a: a | {"message": a["message"].mT.contiguous().mT},
}


@pytest.mark.parametrize("wrong", [WRONG, WRONG_LAYOUTS], ids=["shapes", "dtypes and strides"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name: str, wrong: dict) -> None:
    outs, lses = draw_partials(1, 3, 4, 8, FP32)
    args = {"out": outs[0], "lse": lses[0], "message": empty_message(outs[0], 2)}
    with pytest.raises(ValueError, match=f"^{name}: wanted"):
        pack_triton(*wrong[name](args).values(), False)


def test_heads_that_do_not_divide_are_refused() -> None:
    outs, lses = draw_partials(1, 2, 9, 8, FP32)
    with pytest.raises(ValueError, match="ranks that divides 9 heads, got 2"):
        pack_triton(outs[0], lses[0], empty_message(outs[0], 2), True)


@each_implementation
def test_an_odd_head_size_of_two_bytes_is_refused(run: Run) -> None:
    """Its LSE would lie across two words."""
    outs, lses = draw_partials(1, 2, 3, 7, BF16)
    with pytest.raises(ValueError, match="got 7 values of 2 bytes"):
        pack(run, outs[0], lses[0], 1)


@pytest.mark.gpu
@pytest.mark.parametrize("by_head", [False, True])
def test_op_on_cuda(by_head: bool) -> None:
    outs, lses = draw_partials(1, 33, 32, 128, BF16)
    wanted = empty_message(outs[0], 4)
    pack_partial_ref(outs[0], lses[0], wanted, by_head)
    got = empty_message(outs[0], 4).to(DEVICE)
    ops.pack_partial(outs[0].to(DEVICE), lses[0].to(DEVICE), got, by_head)
    assert torch.equal(as_bytes(got.cpu()), as_bytes(wanted))
