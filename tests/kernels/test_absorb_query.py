"""`absorb_query` against its float64 oracle and the unfused formula: on the CPU, and in Triton."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphattn.kernels import fused_ops
from graphattn.kernels.absorb_query import absorb_query
from graphattn.kernels.absorb_query_ref import absorb_query_ref
from tests.kernels.fused_case import (
    BF16,
    FP16,
    FP32,
    LAYOUTS,
    NAN,
    Run,
    assert_within,
    draw,
    each_implementation,
    magnitudes,
    roundoff,
    unfused_rotation,
)

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def inputs(
    tokens: int,
    heads: int,
    nope: int,
    value_dim: int,
    rope_dim: int,
    dtype: torch.dtype,
    angles: torch.dtype | None = None,
) -> Inputs:
    """q, up, cos, sin; `up` is the first part of each head of a wider projection."""
    q = draw(tokens, heads, nope + rope_dim, dtype=dtype, seed=1)
    up = draw(heads, nope + 5, value_dim, dtype=dtype, seed=2)[:, :nope]
    cos, sin = draw(2, tokens, rope_dim // 2, dtype=angles or dtype, seed=3)
    return q, up, cos, sin


CASES = {
    "deepseek": ((3, 2, 40, 48, 16, FP32), "pairs to halves"),
    "bf16": ((2, 3, 10, 20, 8, BF16), "pairs to halves"),
    "several programs": ((67, 1, 40, 150, 6, FP16), "halves"),
    "fp32 angles": ((3, 2, 16, 33, 4, FP16, FP32), "pairs"),
}


@each_implementation
@pytest.mark.parametrize(("sizes", "layout"), CASES.values(), ids=CASES)
def test_product_and_rotation(sizes: tuple, layout: str, run: Run) -> None:
    """The product is summed in fp32 and rounded once; a rotation rounds each product and the sum.
    The output is part of a wider tensor, whose rest stays."""
    q, up, cos, sin = inputs(*sizes)
    nope, value_dim = up.shape[1:]
    pairs_in, pairs_out = LAYOUTS[layout]
    rotation = {"pairs_in": pairs_in, "pairs_out": pairs_out}
    wide = torch.full((*q.shape[:2], 8 + q.shape[2] - nope + value_dim), NAN, dtype=q.dtype)
    run("absorb_query", q, up, cos, sin, wide[..., 8:], pairs_in, pairs_out)
    wanted = absorb_query_ref(q, up, cos, sin, **rotation)
    u = roundoff(q.dtype, run)
    terms = torch.einsum("thn,hnc->thc", q[..., :nope].double().abs(), up.double().abs())
    product = wanted[..., :value_dim].abs() * u + (nope + 8) * 2.0**-23 * terms
    turned = 2.01 * u * magnitudes(q[..., nope:], cos, sin, **rotation)
    assert_within(wide[..., 8:], wanted, torch.cat([product, turned], 2))
    assert wide[..., :8].isnan().all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_bit_for_bit_as_the_unfused_model(dtype: torch.dtype, layout: str) -> None:
    q, up, cos, sin = inputs(5, 3, 16, 24, 8, dtype)
    pairs_in, pairs_out = LAYOUTS[layout]
    out = torch.empty(5, 3, 32, dtype=dtype)
    fused_ops.absorb_query(q, up, cos, sin, out, pairs_in, pairs_out)
    product = torch.bmm(q[..., :16].transpose(0, 1), up).transpose(0, 1)
    rotated = unfused_rotation(q[..., 16:], cos, sin, pairs_in=pairs_in, pairs_out=pairs_out)
    assert torch.equal(out, torch.cat([product, rotated], -1))


@each_implementation
def test_a_token_is_the_same_whatever_stands_beside_it(run: Run) -> None:
    q, up, cos, sin = inputs(66, 1, 16, 16, 4, FP32)
    q[:65] = NAN
    out = torch.zeros(66, 1, 20)
    run("absorb_query", q, up, cos, sin, out, False, False)
    alone = torch.empty(1, 1, 20)
    run("absorb_query", q[65:], up, cos[65:], sin[65:], alone, False, False)
    assert out[:65].isnan().all()
    torch.testing.assert_close(out[65:], alone, atol=1e-5, rtol=1e-5)
    run("absorb_query", q[:0], up, cos[:0], sin[:0], out[:0], False, False)


WRONG: dict[str, tuple[str, Any]] = {
    "flat": ("q", lambda t: t[0]),
    "columns first": ("q", lambda t: t.mT.contiguous().mT),
    "other heads": ("up", lambda t: t[1:]),
    "all of q": ("up", lambda t: t.repeat(1, 2, 1)),
    "another dtype": ("up", lambda t: t.half()),
    "narrow": ("q_out", lambda t: t[..., 1:]),
    "wide": ("q_out", lambda t: t.double()),
    "fewer angles": ("sin", lambda t: t[:, :1]),
}


@pytest.mark.parametrize(("name", "change"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named(name: str, change: Any) -> None:
    q, up, cos, sin = inputs(3, 2, 12, 16, 8, FP32)
    args = {"q": q, "up": up, "cos": cos, "sin": sin, "q_out": torch.full((3, 2, 24), NAN)}
    args[name] = change(args[name])
    with pytest.raises(ValueError, match=f"^{name}: wanted"):
        absorb_query(**args, pairs_in=True, pairs_out=False)
    assert args["q_out"].isnan().all()
