"""`latent_norm_write` against its float64 oracle and the unfused formula: CPU and Triton."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphattn.kernels.latent_norm_write import latent_norm_write
from graphattn.kernels.latent_norm_write_ref import latent_norm_write_ref
from graphattn.kernels.latent_write_ref import latent_write_ref
from tests.kernels.fused_case import (
    BF16,
    FP16,
    FP32,
    LAYOUTS,
    NAN,
    PAGE_SIZE,
    PAGES,
    SLOTS,
    STYLES,
    WRITTEN,
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

EPS = 1e-3


class Case:
    """Parts of one projection; the latent is NaN where nothing is written."""

    def __init__(
        self,
        width: int,
        value_dim: int,
        rope_dim: int,
        dtype: torch.dtype = FP32,
        *,
        angles: torch.dtype | None = None,
    ) -> None:
        tokens = len(SLOTS)
        joined = draw(tokens, width + value_dim + rope_dim, dtype=dtype, seed=2)
        joined[~WRITTEN, width:] = NAN
        self.q, self.latent = joined[:, :width], joined[:, width:]
        self.cos, self.sin = draw(2, tokens, rope_dim // 2, dtype=angles or dtype, seed=3)
        self.q_weight, self.weight = (draw(n, dtype=dtype, seed=4) for n in (width, value_dim))
        self.wide = torch.full((tokens, width + 6), NAN, dtype=dtype)
        self.q_out = self.wide[:, :width]
        self.before = draw(PAGES, PAGE_SIZE, value_dim + rope_dim, dtype=dtype, seed=5)
        self.pool = self.before.clone()

    def run(
        self, run: Run, layout: str, style: str = "rounded", scale: Tensor | None = None
    ) -> None:
        query = (self.q, self.q_weight, self.q_out)
        entry = (self.latent, self.cos, self.sin, self.weight, SLOTS, self.pool, scale)
        run("latent_norm_write", *query, *entry, EPS, style, *LAYOUTS[layout])

    @property
    def entries(self) -> Tensor:
        """Latents of the tokens that were written, from the pool."""
        slot = SLOTS[WRITTEN]
        return self.pool[slot // PAGE_SIZE, slot % PAGE_SIZE]

    def assert_nothing_else_was_written(self) -> None:
        wanted, slot = self.before.clone(), SLOTS[WRITTEN]
        wanted[slot // PAGE_SIZE, slot % PAGE_SIZE] = self.entries
        assert torch.equal(self.pool, wanted)
        assert self.wide[:, self.q.shape[1] :].isnan().all()


CASES = {
    "deepseek": ((64, 48, 16, FP32), "pairs to halves"),
    "bf16": ((33, 20, 8, BF16), "pairs to halves"),
    "halves": ((17, 33, 6, FP16), "halves"),
    "pairs": ((5, 9, 2, FP32), "pairs"),
}


@each_implementation
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("sizes", "layout"), CASES.values(), ids=CASES)
def test_latents_are_normed_rotated_and_written(
    sizes: tuple, layout: str, style: str, run: Run
) -> None:
    """A rotation errs by a rounding of each product and one of their sum."""
    width, value_dim, _, dtype = sizes
    case = Case(*sizes)
    pairs_in, pairs_out = LAYOUTS[layout]
    rotation = {"pairs_in": pairs_in, "pairs_out": pairs_out}
    case.run(run, layout, style)
    q, latent = latent_norm_write_ref(
        case.q,
        case.q_weight,
        case.latent,
        case.cos,
        case.sin,
        case.weight,
        EPS,
        style,
        **rotation,
    )
    assert_within(case.q_out, q, q.abs() * norm_error(dtype, width, style, run))
    bound = latent.abs() * norm_error(dtype, value_dim, style, run)
    keys = case.latent[:, None, value_dim:]
    sizes_of_keys = magnitudes(keys, case.cos, case.sin, **rotation)[:, 0]
    bound[:, value_dim:] = 2.01 * roundoff(dtype, run) * sizes_of_keys
    assert_within(case.entries, latent[WRITTEN], bound[WRITTEN])
    case.assert_nothing_else_was_written()


@each_implementation
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("angles", [FP16, FP32], ids=str)
def test_it_rounds_where_the_unfused_model_rounds(
    angles: torch.dtype, layout: str, run: Run
) -> None:
    """The rotation bit for bit, the norms too on the CPU; a kernel sums in another order."""
    case = Case(56, 40, 16, FP16, angles=angles)
    case.run(run, layout)
    pairs_in, pairs_out = LAYOUTS[layout]
    key = case.latent[:, None, 40:]
    rotated = unfused_rotation(key, case.cos, case.sin, pairs_in=pairs_in, pairs_out=pairs_out)
    assert torch.equal(case.entries[:, 40:], rotated[WRITTEN, 0])
    of_q = unfused_norm(case.q, case.q_weight, EPS, "rounded")
    of_c = unfused_norm(case.latent[WRITTEN, :40], case.weight, EPS, "rounded")
    for got, wanted in ((case.q_out, of_q), (case.entries[:, :40], of_c)):
        off = (got != wanted).double().mean()
        assert off == 0 if run is run_cpu else off < 0.02


@each_implementation
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scales"])
def test_an_fp8_pool_holds_what_was_rounded(scaled: bool, run: Run) -> None:
    case, rounded = Case(2, 20, 16, BF16), Case(2, 20, 16, BF16)
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
def test_without_a_low_rank_query_and_in_place(run: Run) -> None:
    case, alone = Case(24, 20, 8), Case(24, 20, 8)
    case.run(run, "pairs to halves")
    query = alone.q.clone()
    entry = (alone.latent, alone.cos, alone.sin, alone.weight, SLOTS, alone.pool, None)
    options = (EPS, "rounded", True, False)
    run("latent_norm_write", None, None, None, *entry, *options)
    assert torch.equal(alone.pool, case.pool)
    run("latent_norm_write", query, alone.q_weight, query, *entry, *options)
    assert torch.equal(query, case.q_out)


@each_implementation
def test_no_places(run: Run) -> None:
    case = Case(2, 20, 8)
    query = (case.q[:0], case.q_weight, case.q_out[:0])
    entry = (case.latent[:0], case.cos[:0], case.sin[:0], case.weight, SLOTS[:0], case.pool)
    run("latent_norm_write", *query, *entry, None, EPS, "rounded", True, False)
    assert torch.equal(case.pool, case.before)


WRONG: dict[str, tuple[str, Any]] = {
    "a query alone": ("q", lambda t: None),
    "fewer rows": ("q", lambda t: t[:2]),
    "another dtype": ("q_out", lambda t: t.half()),
    "narrow": ("q_out", lambda t: t[:, 1:]),
    "long weight": ("q_weight", lambda t: t.repeat(2)),
    "no rows": ("latent", lambda t: t[0]),
    "some angles": ("sin", lambda t: t[:, :2]),
    "all of it": ("weight", lambda t: t.repeat(2)),
    "wide weight": ("weight", lambda t: t.double()),
    "narrow slots": ("kv_slot", lambda t: t.int()),
    "another pool": ("pool", lambda t: t[..., 1:]),
    "a scale": ("latent_scale", lambda t: torch.ones(2)),
    "unknown": ("style", lambda t: "gemma"),
}


@pytest.mark.parametrize(("name", "change"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named_and_nothing_is_written(name: str, change: Any) -> None:
    case = Case(12, 20, 8)
    names = ("q", "q_weight", "q_out", "latent", "cos", "sin", "weight", "pool")
    args = {x: getattr(case, x) for x in names} | {"kv_slot": SLOTS, "latent_scale": None}
    args |= {"eps": EPS, "style": "rounded", "pairs_in": True, "pairs_out": False}
    args[name] = change(args[name])
    with pytest.raises(ValueError, match=f"^{name}: wanted"):
        latent_norm_write(**args)
    assert case.wide.isnan().all()
    assert torch.equal(case.pool, case.before)


def test_angles_for_a_part_of_the_key_are_refused() -> None:
    case = Case(12, 20, 8)
    entry = (case.latent, case.cos[:, :2], case.sin[:, :2], case.weight, SLOTS, case.pool)
    with pytest.raises(ValueError, match=r"^cos: wanted"):
        latent_norm_write(None, None, None, *entry, None, EPS, "rounded", True, False)
