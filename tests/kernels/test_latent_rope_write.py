"""`latent_rope_write` against its float64 oracle and the unfused formula: CPU and Triton."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphattn.kernels.latent_rope_write import latent_rope_write
from graphattn.kernels.latent_rope_write_ref import latent_rope_write_ref
from graphattn.kernels.latent_write_ref import latent_write_ref
from tests.kernels.fused_case import (
    BF16,
    FP16,
    FP32,
    LAYOUTS,
    NAN,
    STYLES,
    Run,
    assert_within,
    draw,
    each_implementation,
    magnitudes,
    norm_error,
    roundoff,
    run_cpu,
    unfused_norm,
    unfused_rotation,
)

PAGES, PAGE_SIZE, EPS = 3, 6, 1e-3
SLOTS = torch.tensor([PAGE_SIZE, -1, PAGES * PAGE_SIZE - 1, 0, -1])
WRITTEN = SLOTS >= 0
NOPE = 5  # values of a query's head before its rope part


class Case:
    """Parts of two projections; the latent is NaN where nothing is written."""

    def __init__(
        self,
        heads: int,
        value_dim: int,
        rope_dim: int,
        dtype: torch.dtype = FP32,
        *,
        angles: torch.dtype | None = None,
    ) -> None:
        tokens = len(SLOTS)
        self.q = draw(tokens, heads, NOPE + rope_dim, dtype=dtype, seed=1)[..., NOPE:]
        self.latent = draw(tokens, 7 + value_dim + rope_dim, dtype=dtype, seed=2)[:, 7:]
        self.latent[~WRITTEN] = NAN
        self.cos, self.sin = draw(2, tokens, rope_dim // 2, dtype=angles or dtype, seed=3)
        self.weight = draw(value_dim, dtype=dtype, seed=4)
        self.absorbed = torch.full((tokens, heads, value_dim + rope_dim), NAN, dtype=dtype)
        self.q_out = self.absorbed[..., value_dim:]
        self.before = draw(PAGES, PAGE_SIZE, value_dim + rope_dim, dtype=dtype, seed=5)
        self.pool = self.before.clone()

    def run(
        self, run: Run, layout: str, style: str = "rounded", scale: Tensor | None = None
    ) -> None:
        inputs = (self.q, self.latent, self.cos, self.sin, self.weight, SLOTS)
        options = (EPS, style, *LAYOUTS[layout])
        run("latent_rope_write", *inputs, self.q_out, self.pool, scale, *options)

    @property
    def entries(self) -> Tensor:
        """Latents of the tokens that were written, from the pool."""
        slot = SLOTS[WRITTEN]
        return self.pool[slot // PAGE_SIZE, slot % PAGE_SIZE]

    def assert_nothing_else_was_written(self) -> None:
        wanted, slot = self.before.clone(), SLOTS[WRITTEN]
        wanted[slot // PAGE_SIZE, slot % PAGE_SIZE] = self.entries
        assert torch.equal(self.pool, wanted)
        assert self.absorbed[..., : len(self.weight)].isnan().all()


CASES = {
    "deepseek": ((4, 48, 16, FP32), "pairs to halves"),
    "bf16": ((3, 20, 8, BF16), "pairs to halves"),
    "halves": ((17, 33, 6, FP16), "halves"),
    "pairs": ((1, 9, 2, FP32), "pairs"),
}


@each_implementation
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("sizes", "layout"), CASES.values(), ids=CASES)
def test_latents_are_normed_rotated_and_written(
    sizes: tuple, layout: str, style: str, run: Run
) -> None:
    """A rotation errs by a rounding of each product and one of their sum."""
    _, value_dim, _, dtype = sizes
    case = Case(*sizes)
    pairs_in, pairs_out = LAYOUTS[layout]
    case.run(run, layout, style)
    rotation = {"pairs_in": pairs_in, "pairs_out": pairs_out}
    angles = (case.cos, case.sin)
    q, latent = latent_rope_write_ref(
        case.q, case.latent, *angles, case.weight, EPS, style, **rotation
    )
    turning = 2.01 * roundoff(dtype, run)
    assert_within(case.q_out, q, turning * magnitudes(case.q, *angles, **rotation))
    bound = latent.abs() * norm_error(dtype, value_dim, style, run) * 1.01
    keys = case.latent[:, None, value_dim:]
    bound[:, value_dim:] = turning * magnitudes(keys, *angles, **rotation)[:, 0]
    assert_within(case.entries, latent[WRITTEN], bound[WRITTEN])
    case.assert_nothing_else_was_written()


@each_implementation
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("angles", [FP16, FP32], ids=str)
def test_it_rounds_where_the_unfused_model_rounds(
    angles: torch.dtype, layout: str, run: Run
) -> None:
    """The rotation bit for bit, the norm too on the CPU; a kernel sums in another order."""
    case = Case(3, 40, 16, FP16, angles=angles)
    case.run(run, layout)
    pairs_in, pairs_out = LAYOUTS[layout]
    q, keys = (
        unfused_rotation(x, case.cos, case.sin, pairs_in=pairs_in, pairs_out=pairs_out)
        for x in (case.q, case.latent[:, None, 40:])
    )
    assert torch.equal(case.q_out, q)
    assert torch.equal(case.entries[:, 40:], keys[WRITTEN, 0])
    normed = unfused_norm(case.latent[WRITTEN, :40], case.weight, EPS, "rounded")
    off = (case.entries[:, :40] != normed).double().mean()
    assert off == 0 if run is run_cpu else off < 0.02


@each_implementation
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scales"])
def test_an_fp8_pool_holds_what_was_rounded(scaled: bool, run: Run) -> None:
    case, rounded = Case(2, 20, 8, FP16), Case(2, 20, 8, FP16)
    scale = torch.tensor([0.02, 0.5]) if scaled else None
    rounded.run(run, "pairs to halves")
    wanted = case.before.to(torch.float8_e4m3fn)
    case.pool = wanted.clone()
    case.run(run, "pairs to halves", scale=scale)
    latents = case.latent.clone()
    latents[WRITTEN] = rounded.entries
    latent_write_ref(latents, SLOTS, wanted, scale, 20)
    assert torch.equal(case.pool.view(torch.uint8), wanted.view(torch.uint8))


@each_implementation
def test_no_places(run: Run) -> None:
    case = Case(2, 20, 8)
    none = (case.q[:0], case.latent[:0], case.cos[:0], case.sin[:0], case.weight, SLOTS[:0])
    options = (None, EPS, "rounded", True, False)
    run("latent_rope_write", *none, case.q_out[:0], case.pool, *options)
    assert torch.equal(case.pool, case.before)


WRONG: dict[str, tuple[str, Any]] = {
    "other heads": ("q", lambda t: t[..., :6]),
    "another dtype": ("q", lambda t: t.half()),
    "columns first": ("q_out", lambda t: t.mT.contiguous().mT),
    "fewer heads": ("q_out", lambda t: t[:, :1]),
    "no rows": ("latent", lambda t: t[0]),
    "some angles": ("cos", lambda t: t[:, :2]),
    "fewer angles": ("sin", lambda t: t[:, :2]),
    "all of it": ("weight", lambda t: t.repeat(2)),
    "wide weight": ("weight", lambda t: t.double()),
    "narrow slots": ("kv_slot", lambda t: t.int()),
    "another pool": ("pool", lambda t: t[..., 1:]),
    "a scale": ("latent_scale", lambda t: torch.ones(2)),
    "unknown": ("style", lambda t: "gemma"),
}


@pytest.mark.parametrize(("name", "change"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named_and_nothing_is_written(name: str, change: Any) -> None:
    case = Case(2, 20, 8)
    args = {x: getattr(case, x) for x in ("q", "latent", "cos", "sin", "weight", "q_out", "pool")}
    args |= {"kv_slot": SLOTS, "latent_scale": None, "eps": EPS, "style": "rounded"}
    args |= {"pairs_in": True, "pairs_out": False}
    args[name] = change(args[name])
    angles = name == "cos"  # fits the shapes of `sin` no more, which is named then
    with pytest.raises(ValueError, match=f"^{'sin' if angles else name}: wanted"):
        latent_rope_write(**args)
    assert case.absorbed.isnan().all()
    assert torch.equal(case.pool, case.before)
