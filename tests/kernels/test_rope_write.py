"""`rope_write` against its float64 oracle and the unfused formula: on the CPU, and in Triton."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphattn.kernels.kv_write_ref import kv_write_ref
from graphattn.kernels.rope_write import rope_write
from graphattn.kernels.rope_write_ref import rope_write_ref
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
    """Q, K and V of one projection; K and V are NaN where nothing is written."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        dim: int,
        rotated: int,
        dtype: torch.dtype = FP32,
        *,
        angles: torch.dtype | None = None,
        norm: bool = False,
    ) -> None:
        qkv = draw(len(SLOTS), heads + 2 * kv_heads, dim, dtype=dtype, seed=1)
        qkv[~WRITTEN, heads:] = NAN
        self.q, self.k, self.v = qkv.split([heads, kv_heads, kv_heads], 1)
        self.cos = self.sin = self.q_weight = self.k_weight = None
        if rotated:  # every second of a wider tensor, as of a model that repeats each angle
            self.cos, self.sin = draw(2, len(SLOTS), rotated, dtype=angles or dtype, seed=2)[
                ..., ::2
            ]
        if norm:
            self.q_weight, self.k_weight = draw(2, dim, dtype=dtype, seed=3)
        self.q_out = torch.full((len(SLOTS), heads, dim), NAN, dtype=dtype)
        shape = (PAGES, kv_heads, PAGE_SIZE, dim)
        self.before = [draw(*shape, dtype=dtype, seed=seed) for seed in (4, 5)]
        self.pools = [pool.clone() for pool in self.before]

    def run(
        self,
        run: Run,
        layout: str = "halves",
        style: str = "rounded",
        scales: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> None:
        rotation = (self.cos, self.sin, self.q_weight, self.k_weight)
        inputs = (self.q, self.k, self.v, *rotation, SLOTS)
        run("rope_write", *inputs, self.q_out, *self.pools, *scales, EPS, style, *LAYOUTS[layout])

    @property
    def keys(self) -> Tensor:
        """K of the tokens that were written, from the pool."""
        slot = SLOTS[WRITTEN]
        return self.pools[0][slot // PAGE_SIZE, :, slot % PAGE_SIZE]

    def assert_nothing_else_was_written(self) -> None:
        """V is as it came, and every other entry as before."""
        wanted = [pool.clone() for pool in self.before]
        kv_write_ref(self.k, self.v, SLOTS, *wanted)
        slot = SLOTS[WRITTEN]
        wanted[0][slot // PAGE_SIZE, :, slot % PAGE_SIZE] = self.keys
        assert all(map(torch.equal, self.pools, wanted))
        assert not any(map(torch.equal, self.pools, self.before))


CASES = {
    "llama": ((9, 3, 64, 64, FP32), "halves"),
    "bf16": ((4, 1, 32, 32, BF16), "halves"),
    "qwen3": ((8, 2, 24, 24, BF16, "rounded"), "halves"),
    "gemma3, fp32": ((3, 3, 16, 16, FP32, "offset"), "halves"),
    "part of an odd head": ((5, 1, 21, 10, FP16), "pairs"),
    "part of a normed head": ((5, 5, 20, 8, FP32, "wide"), "halves"),
    "pairs come apart": ((2, 1, 12, 12, FP16), "pairs to halves"),
    "no positions": ((4, 2, 16, 0, FP32), "halves"),
    "no positions, normed": ((4, 2, 16, 0, FP16, "rounded"), "halves"),
    "several programs": ((17, 3, 256, 64, FP16), "pairs"),
}


@each_implementation
@pytest.mark.parametrize(("sizes", "layout"), CASES.values(), ids=CASES)
def test_heads_are_normed_rotated_and_written(sizes: tuple, layout: str, run: Run) -> None:
    """A rotation errs by a rounding of each product and one of their sum, and by its inputs."""
    heads, kv_heads, dim, rotated, dtype, *norm = sizes
    case = Case(heads, kv_heads, dim, rotated, dtype, norm=bool(norm))
    pairs_in, pairs_out = LAYOUTS[layout]
    style = norm[0] if norm else "rounded"
    case.run(run, layout, style)
    rotation = {"pairs_in": pairs_in, "pairs_out": pairs_out}
    angles, weights = (case.cos, case.sin), (case.q_weight, case.k_weight)
    exact = rope_write_ref(case.q, case.k, *angles, *weights, EPS, style, **rotation)
    error = norm_error(dtype, dim, style, run) if norm else 0.0
    error += 2.01 * roundoff(dtype, run) if rotated else 0.0
    written = torch.ones_like(WRITTEN), WRITTEN
    for got, wanted, x, weight, where in zip(
        (case.q_out, case.keys), exact, (case.q, case.k), weights, written, strict=True
    ):
        size = x.double() if weight is None else unfused_norm(x.double(), weight, EPS, style)
        if rotated:
            size = magnitudes(size, *angles, **rotation)
        assert_within(got, wanted[where], 1.01 * error * size[where].abs())
    case.assert_nothing_else_was_written()


@each_implementation
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("angles", [FP16, FP32], ids=str)
def test_it_rounds_where_the_unfused_model_rounds(
    angles: torch.dtype, layout: str, run: Run
) -> None:
    """Bit for bit: products to the model's dtype, but with angles of fp32 the sum alone."""
    case = Case(5, 2, 20, 16, FP16, angles=angles)
    case.run(run, layout)
    pairs_in, pairs_out = LAYOUTS[layout]
    q, k = (
        unfused_rotation(x, case.cos, case.sin, pairs_in=pairs_in, pairs_out=pairs_out)
        for x in (case.q, case.k)
    )
    assert torch.equal(case.q_out, q)
    assert torch.equal(case.keys, k[WRITTEN])


@each_implementation
@pytest.mark.parametrize("style", STYLES)
def test_a_norm_rounds_before_the_rotation(style: str, run: Run) -> None:
    """Bit for bit on the CPU; a kernel sums in another order."""
    case = Case(6, 2, 64, 64, FP16, norm=True)
    case.run(run, "halves", style)
    normed = unfused_norm(case.q, case.q_weight, EPS, style)
    wanted = unfused_rotation(normed, case.cos, case.sin, pairs_in=False, pairs_out=False)
    off = (case.q_out != wanted).double().mean()
    assert off == 0 if run is run_cpu else off < 0.02


@each_implementation
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scales"])
def test_fp8_pools_hold_what_was_rounded_and_rotated(scaled: bool, run: Run) -> None:
    case, rounded = (Case(3, 3, 20, 16, BF16, norm=True) for _ in range(2))
    scales = (torch.tensor([0.02, 0.5, 3.0]), torch.tensor([0.1])) if scaled else (None, None)
    rounded.run(run)
    wanted = [pool.to(torch.float8_e4m3fn) for pool in case.before]
    case.pools = [pool.clone() for pool in wanted]
    case.run(run, scales=scales)
    keys = case.k.clone()
    keys[WRITTEN] = rounded.keys
    kv_write_ref(keys, case.v, SLOTS, *wanted, *scales)
    for got, exact in zip(case.pools, wanted, strict=True):
        assert torch.equal(got.view(torch.uint8), exact.view(torch.uint8))


@each_implementation
def test_layouts_of_others(run: Run) -> None:
    """Heads that alternate between Q, K and V, a wider output, pools with entries before heads."""
    plain, other = Case(2, 2, 16, 16), Case(2, 2, 16, 16)
    plain.run(run)
    mixed = torch.stack([plain.q, plain.k, plain.v], 2)
    other.q, other.k, other.v = mixed.unbind(2)
    wide = torch.full((len(SLOTS), 2, 40), NAN)
    other.q_out = wide[..., 8:24]
    other.pools = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in other.before]
    other.run(run)
    assert torch.equal(other.q_out, plain.q_out)
    assert all(map(torch.equal, other.pools, plain.pools))
    assert int(wide.isnan().sum()) == len(SLOTS) * 2 * 24


@each_implementation
def test_no_places(run: Run) -> None:
    case = Case(2, 1, 16, 16)
    none = (case.q[:0], case.k[:0], case.v[:0], case.cos[:0], case.sin[:0], None, None, SLOTS[:0])
    run("rope_write", *none, case.q_out[:0], *case.pools, None, None, EPS, "rounded", False, False)
    assert all(map(torch.equal, case.pools, case.before))


WRONG: dict[str, tuple[str, Any]] = {
    "other heads": ("q", lambda t: t[..., :8]),
    "another dtype": ("q", lambda t: t.half()),
    "columns first": ("q_out", lambda t: t.mT.contiguous().mT),
    "fewer heads": ("q_out", lambda t: t[:, :1]),
    "no keys": ("k", lambda t: t[:, 0]),
    "other values": ("v", lambda t: t[:, :0]),
    "cosines alone": ("sin", lambda t: None),
    "too many angles": ("cos", lambda t: t.repeat(1, 2)),
    "fewer angles": ("sin", lambda t: t[:, :4]),
    "narrow angles": ("cos", lambda t: t.half()),
    "one weight": ("k_weight", lambda t: None),
    "long weights": ("q_weight", lambda t: t.repeat(2)),
    "narrow slots": ("kv_slot", lambda t: t.int()),
    "another pool": ("v_pool", lambda t: t[1:]),
    "a scale": ("k_scale", lambda t: torch.ones(1)),
    "unknown": ("style", lambda t: "gemma"),
}


@pytest.mark.parametrize(("name", "change"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named_and_nothing_is_written(name: str, change: Any) -> None:
    case = Case(2, 1, 16, 16, norm=True)
    args = {x: getattr(case, x) for x in ("q", "k", "v", "cos", "sin", "q_weight", "k_weight")}
    args |= {"kv_slot": SLOTS, "q_out": case.q_out, "k_pool": case.pools[0]}
    args |= {"v_pool": case.pools[1], "k_scale": None, "v_scale": None, "eps": EPS}
    args |= {"style": "rounded", "pairs_in": False, "pairs_out": False}
    args[name] = change(args[name])
    with pytest.raises(ValueError, match=f"^{name}: wanted"):
        rope_write(**args)
    assert case.q_out.isnan().all()
    assert all(map(torch.equal, case.pools, case.before))
