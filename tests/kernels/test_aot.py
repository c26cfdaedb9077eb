"""Every kernel compiles for the GPUs it is meant for, within its budget, without a GPU."""

from __future__ import annotations

import json

import pytest
import torch

from graphattn.kernels.tiles import latent_tiles
from tests.aot import Job, compile_all
from tests.kernels.budgets import BUDGETS, cost, key
from tests.kernels.jobs import fp8_jobs, main_fp8_jobs, main_jobs, more_jobs


def assert_within_budget(named: list[tuple[str, Job]]) -> None:
    budgets = json.loads(BUDGETS.read_text())
    over = []
    for (name, job), compiled in zip(named, compile_all([job for _, job in named]), strict=True):
        budget, got = budgets[key(name, job)], cost(name, compiled)
        for what in ("registers", "stack", "shared"):
            if got[what] > budget[what]:
                over.append(f"{key(name, job)}: {what} {got[what]} > {budget[what]}")
        if got.get("loop") != budget.get("loop"):
            over.append(f"{key(name, job)}: inner loop {got['loop']}, not {budget['loop']}")
        if job.kernel in ("decode_kernel", "prefill_kernel") and not compiled.matrix:
            over.append(f"{key(name, job)}: no matrix instructions")
    assert not over, "\n".join(over)


def test_main_tiles_stay_within_their_budget() -> None:
    assert_within_budget([*main_jobs(), *main_fp8_jobs()])


@pytest.mark.slow
def test_all_tiles_and_options_stay_within_their_budget() -> None:
    assert_within_budget([*fp8_jobs(), *more_jobs()])


def test_no_tile_spills() -> None:
    """But for a few bytes of fp16 and fp32, which no tile table is tuned for."""
    budgets = json.loads(BUDGETS.read_text())
    spills = {
        name: budget["stack"]
        for name, budget in budgets.items()
        if budget["stack"] and "loop" not in budget
    }
    assert not [name for name in spills if "bf16" in name]
    assert all(stack <= 32 for stack in spills.values()), spills


LATENTS = {n: b["loop"] for n, b in json.loads(BUDGETS.read_text()).items() if "loop" in b}


@pytest.mark.parametrize("name", LATENTS)
def test_latent_tiles_spill_in_no_inner_loop(name: str) -> None:
    """And a tile of 64 rows runs on the wide matrix instructions of its architecture.

    The cast of FP8 entries takes registers that sm_100 has not: there some are spilled.
    """
    loop = LATENTS[name]
    if "fp8 KV sm_100" in name:
        assert loop.get("LDL", 0) + loop.get("STL", 0) <= 40
    else:
        assert not {"LDL", "STL"} & loop.keys()
    assert loop["LDGSTS"] > 0
    rows = int(name.split()[4].split("x")[0])
    wide = {"sm_90": "HGMMA", "sm_100": "UTCHMMA"}.get(name.split()[-1])
    assert loop[wide if rows == 64 and wide else "HMMA"] > 0


def test_latent_tiles_of_gathered_heads_have_64_rows() -> None:
    for arch in ("sm_90", "sm_100"):
        assert f"latent decode bf16 512+64 64x64 {arch}" in LATENTS


def test_a_block_fits_the_smallest_multiprocessor_of_its_table() -> None:
    """227 KiB; 99 KiB for the sm_80 table, which serves sm_86, sm_89 and sm_120 too, but for
    latents in tiles of 32 rows, which it has for sm_80 itself: 163 KiB."""
    budgets = json.loads(BUDGETS.read_text())
    for name, budget in budgets.items():
        kib = 227
        if name.endswith("sm_80"):
            kib = 163 if name.startswith("latent") and " 32x" in name else 99
        assert budget["shared"] <= kib * 1024, name
    small = latent_tiles(
        "sm_89",
        head_dim=576,
        value_dim=512,
        heads=128,
        decode_query_len=1,
        page_size=64,
        dtype=torch.bfloat16,
    )
    assert small.decode.block_m == small.prefill.block_m == 16


def test_the_compiler_names_what_is_wrong() -> None:
    with pytest.raises(AssertionError, match="no arguments of kv_write_kernel: \\['nonsense'\\]"):
        compile_all([Job("kv_write", "kv_write_kernel", "sm_90", {"nonsense": "*i32"}, {})])
