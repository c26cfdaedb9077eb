"""Attention over FP8 pools and writes into them: kernels and CPU against the format's oracle.

The pools of a case hold bytes of the oracle's own rounding; what no token sees is NaN.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from graphattn.kernels import attend as attend_kernels
from graphattn.kernels import attend_cpu, attend_latent_cpu, kv_write_cpu, latent_write_cpu
from graphattn.kernels import attend_latent as latent_kernels
from graphattn.kernels.attend import attend
from graphattn.kernels.attend_latent import attend_latent
from graphattn.kernels.fp8 import FP8
from graphattn.kernels.kv_write import kv_write
from graphattn.kernels.kv_write_ref import kv_write_ref
from graphattn.kernels.latent_write import latent_write
from graphattn.kernels.latent_write_ref import latent_write_ref
from tests.kernels import attend_case, latent_case
from tests.kernels.attend_case import Row, Setting
from tests.kernels.latent_case import Latent

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

ATTEND = {"kernel": attend, "cpu": attend_cpu.attend}
LATENT = {"kernel": attend_latent, "cpu": attend_latent_cpu.attend_latent}
WRITE = {"kernel": kv_write, "cpu": kv_write_cpu.kv_write}
WRITE_LATENT = {"kernel": latent_write, "cpu": latent_write_cpu.latent_write}
HOW = pytest.mark.parametrize("how", ["kernel", "cpu"])

ROWS = [
    Row(0, 1, seed=1),  # a first token
    Row(40, 1, seed=2),  # splits and a page's end
    Row(7, 3, seed=3, tokens=2),  # a draft that is missing
    Row(9, 7, seed=4, prefill=True),
    Row(0, 2, padding=True),
]
KV8 = Setting(kv_dtype=FP8, scales="head", decode_query_len=3, tail=2)
SETTINGS = {
    "scales by head, window, short pages": replace(KV8, window=9, page_size=6, dim=24),
    "one scale, soft-cap, sinks": replace(
        KV8, softcap=4.0, sinks=True, dtype=BF16, scales="tensor"
    ),
    "no scales, fp16": replace(KV8, dtype=FP16, scales="", heads=2, dim=20),
}


def on_host(how: str, setting: Setting) -> Setting:
    return replace(setting, device="cpu") if how == "cpu" else setting


@HOW
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_attention(how: str, setting: Setting) -> None:
    case = attend_case.build(ROWS, on_host(how, setting))
    ATTEND[how](*case.args.values())
    attend_case.check(case)


@HOW
def test_attention_over_ranks(how: str) -> None:
    """Each rank's part is right, empty ones included; LSE and outputs carry the scales."""
    setting = replace(on_host(how, KV8), dcp_size=2, interleave=3)
    for shard in attend_case.shards(setting):
        case = attend_case.build(ROWS[::2], shard)
        ATTEND[how](*case.args.values())
        attend_case.check(case)


LATENTS = {
    "no scales, fp32": Latent(heads=2, setting=replace(KV8, scales="")),
    "two scales, odd sizes": Latent(
        3, 20, 10, setting=replace(KV8, scales="tensor", dtype=BF16, page_size=6)
    ),
}


@HOW
@pytest.mark.parametrize("latent", LATENTS.values(), ids=LATENTS)
def test_latent_attention(how: str, latent: Latent) -> None:
    case = latent_case.build(ROWS, replace(latent, setting=on_host(how, latent.setting)))
    LATENT[how](*case.args.values())
    latent_case.check(case)


@HOW
def test_a_visible_nan_is_seen(how: str) -> None:
    """0x7F read as a number would be 480: the poisoned request would look healthy."""
    case = attend_case.build(ROWS[:2], on_host(how, KV8))
    a = case.args
    slot = int(a["slot_of_row"][1])
    a["v_pool"].view(torch.uint8)[int(a["page_table"][slot, 0]), 0, 3, 5] = 0x7F
    ATTEND[how](*a.values())
    poisoned = a["out"].isnan().any(-1).any(-1)
    assert poisoned[case.row_places[1]].all()
    assert int(poisoned.sum()) == 1


def draw(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Values over the whole range of the format and beyond, with what rounding must not harm."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 2.0 ** torch.randint(-14, 12, shape, generator=generator)
    values = (torch.randn(shape, generator=generator) * sizes).to(dtype)
    values.view(-1)[:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    return values


def assert_same_pool(got: Tensor, wanted: Tensor) -> None:
    got, wanted = got.cpu().float(), wanted.float()
    torch.testing.assert_close(got, wanted, atol=0.0, rtol=0.0, equal_nan=True)


@HOW
@pytest.mark.parametrize(
    ("dtype", "scales"),
    [(BF16, (0.3, 7e-3, 2.0)), (FP16, (0.011,)), (FP32, None)],
    ids=["by head", "one", "none"],
)
def test_writing(how: str, dtype: torch.dtype, scales: tuple[float, ...] | None) -> None:
    kv_slot = torch.tensor([0, -1, 5, 6, 29, 14])
    k, v = (draw(6, 3, 20, dtype=dtype, seed=seed) for seed in (1, 2))
    v_scale = None if scales is None else torch.tensor(scales)
    k_scale = None if v_scale is None else v_scale * 1.7
    start = torch.full((5, 3, 6, 20), torch.nan).to(FP8)
    wanted, got = [start.clone(), start.clone()], [start.clone(), start.clone()]
    kv_write_ref(k, v, kv_slot, *wanted, k_scale, v_scale)
    device = DEVICE if how == "kernel" else "cpu"
    args = [k, v, kv_slot, *got, k_scale, v_scale]
    moved = [None if x is None else x.to(device) for x in args]
    WRITE[how](*moved)
    for pool, right in zip(moved[3:5], wanted, strict=True):
        assert_same_pool(pool, right)
        assert not torch.equal(right.view(torch.uint8), start.view(torch.uint8))


@HOW
@pytest.mark.parametrize("scales", [(0.3, 7e-3), None], ids=str)
def test_writing_latents(how: str, scales: tuple[float, float] | None) -> None:
    kv_slot = torch.tensor([0, -1, 5, 6, 29, 14])
    latent = draw(6, 30, dtype=BF16, seed=1)
    scale = None if scales is None else torch.tensor(scales)
    wanted = torch.full((5, 6, 30), torch.nan).to(FP8)
    device = DEVICE if how == "kernel" else "cpu"
    got = wanted.clone().to(device)
    latent_write_ref(latent, kv_slot, wanted, scale, 20)
    there = None if scale is None else scale.to(device)
    WRITE_LATENT[how](latent.to(device), kv_slot.to(device), got, there, 20)
    assert_same_pool(got, wanted)


@HOW
def test_pools_of_other_layouts(how: str) -> None:
    """Heads innermost, and K beside V in one tensor: views of bytes keep strides."""
    device = DEVICE if how == "kernel" else "cpu"
    kv_slot = torch.tensor([3, 0])
    k, v = (draw(2, 2, 16, dtype=BF16, seed=seed) for seed in (1, 2))
    wanted = torch.zeros(2, 1, 2, 4, 16).to(FP8)
    kv_write_ref(k, v, kv_slot, wanted[0], wanted[1])
    inner = torch.zeros(1, 4, 2, 16).to(FP8).to(device).transpose(1, 2)
    beside = torch.zeros(1, 2, 2, 4, 16).to(FP8).to(device)
    WRITE[how](k.to(device), v.to(device), kv_slot.to(device), inner, beside[:, 1])
    assert_same_pool(inner, wanted[0])
    assert_same_pool(beside[:, 1], wanted[1])
    assert not beside[:, 0].view(torch.uint8).any()


SCALES = {
    "another size": lambda s: s.repeat(2),
    "another dtype": lambda s: s.double(),
    "strided": lambda s: s.repeat_interleave(2)[::2],
}


@pytest.mark.parametrize("wrong", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_a_wrong_scale_is_named(name: str, wrong: Any) -> None:
    case = attend_case.build(ROWS[:1], KV8)
    args = case.args | {name: wrong(case.args[name])}
    with pytest.raises(ValueError, match=rf"^{name}: wanted contiguous .*float32 \[1\] or \[2\]"):
        attend(*args.values())


def test_other_pools_take_no_scale() -> None:
    case = attend_case.build(ROWS[:1], Setting(dtype=BF16))
    args = case.args | {"k_scale": torch.ones(1, device=DEVICE)}
    with pytest.raises(ValueError, match=r"^k_scale: wanted None for pools of torch\.bfloat16"):
        attend(*args.values())
    pool = torch.zeros(1, 4, 16, device=DEVICE)
    slot = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"^latent_scale: wanted None"):
        latent_write(pool[:, 0], slot, pool, torch.ones(2, device=DEVICE), 8)


def test_a_latent_scale_needs_to_know_where_the_values_end() -> None:
    pool = torch.zeros(1, 4, 16, device=DEVICE).to(FP8)
    slot = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    latent = torch.zeros(1, 16, device=DEVICE)
    with pytest.raises(ValueError, match=r"^value_dim: wanted 1 to 15 with a latent_scale, got 0"):
        latent_write(latent, slot, pool, torch.ones(2, device=DEVICE))


def test_pools_of_two_dtypes_are_refused() -> None:
    case = attend_case.build(ROWS[:1], KV8)
    args = case.args | {"v_pool": torch.zeros_like(case.args["v_pool"], dtype=FP32)}
    with pytest.raises(ValueError, match=r"^v_pool: wanted q's dtype"):
        attend(*args.values())


def test_splits_of_fp8_rows_are_longer() -> None:
    """Partials are as large, KV half as large: the chunk doubles, and with it their ratio stays."""
    for tiles, options in (
        (attend_kernels.attention_tiles, {"head_dim": 128, "group": 16, "decode_query_len": 4}),
        (
            latent_kernels.latent_tiles,
            {"head_dim": 576, "value_dim": 512, "heads": 128, "decode_query_len": 1},
        ),
    ):
        wide, narrow = (
            tiles("sm_90", page_size=64, dtype=BF16, kv_dtype=kv, **options) for kv in (BF16, FP8)
        )
        assert narrow.chunk == 2 * wide.chunk
