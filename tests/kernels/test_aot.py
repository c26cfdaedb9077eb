"""Every kernel compiles for the GPUs it is meant for, within its budget, without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphattn.kernels.tiles import latent_tiles
from tests.aot import Compiled, Job, compile_all
from tests.kernels.budget_page import BEGIN, END, PAGE, tables
from tests.kernels.budgets import all_jobs, cost, excesses, key, load
from tests.kernels.fused_jobs import main_fused_jobs
from tests.kernels.jobs import main_fp8_jobs, main_jobs

BUDGETS = load()


def assert_within_budget(named: list[tuple[str, Job]], *, disassemble: bool = False) -> None:
    compiled = compile_all([job for _, job in named])
    found = {key(name, job.arch): c for (name, job), c in zip(named, compiled, strict=True)}
    over = excesses(found, BUDGETS, disassemble=disassemble)
    for (name, job), result in zip(named, compiled, strict=True):
        if job.kernel in ("decode_kernel", "prefill_kernel") and not result.matrix:
            over.append(f"{name} {job.arch}: no matrix instructions")
    assert not over, "\n".join(over)


def is_latent(name: str) -> bool:
    return name.startswith(("latent decode", "latent prefill"))


def test_main_tiles_stay_within_their_budget() -> None:
    named = [*main_jobs(), *main_fp8_jobs(), *main_fused_jobs("sm_90")]
    assert_within_budget([x for x in named if not is_latent(x[0])])
    assert_within_budget([x for x in named if is_latent(x[0])], disassemble=True)


@pytest.mark.slow
def test_everything_stays_within_its_budget() -> None:
    jobs = all_jobs()
    assert jobs.keys() == BUDGETS.keys()
    named = [(name.removesuffix(f" {job.arch}"), job) for name, job in jobs.items()]
    assert_within_budget(named, disassemble=True)


def test_no_tile_spills() -> None:
    """But for a few bytes of fp16 and fp32, which no tile table is tuned for."""
    spills = {n: b["stack"] for n, b in BUDGETS.items() if b["stack"] and not is_latent(n)}
    assert not [name for name in spills if "bf16" in name]
    assert all(stack <= 32 for stack in spills.values()), spills


LATENTS = {name: budget["loop"] for name, budget in BUDGETS.items() if is_latent(name)}


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
    for name, budget in BUDGETS.items():
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


FITS = Compiled("sm_90", 4, registers=128, stack=0, shared=70_000, matrix="", cubin="")
TABLE = {"some kernel sm_90": cost(FITS)}
EXCESSES = {
    "more registers": ({"registers": 130}, "registers 144 > 128"),
    "spills": ({"stack": 8}, "stack 8 > 0"),
    "more shared memory": ({"shared": 70_001}, "shared 70001 > 70000"),
    "half the CTAs": ({"shared": 80_000}, "resident CTAs 2 < 3"),
    "more warps": ({"warps": 8}, "resident CTAs 2 < 3"),
}


@pytest.mark.parametrize(("change", "text"), EXCESSES.values(), ids=EXCESSES)
def test_what_costs_more_is_named_with_the_command(change: dict[str, int], text: str) -> None:
    over = excesses({"some kernel sm_90": replace(FITS, **change)}, TABLE)
    assert f"some kernel sm_90: {text}" in over
    assert "python -m tests.kernels.budgets" in over[-1]


def test_what_costs_less_is_within_the_budget() -> None:
    cheaper = replace(FITS, registers=100, shared=0)
    assert not excesses({"some kernel sm_90": FITS}, TABLE)
    assert not excesses({"some kernel sm_90": cheaper}, TABLE)


def test_the_page_shows_the_table() -> None:
    text = PAGE.read_text()
    assert text.partition(BEGIN)[2].partition(END)[0] == tables(BUDGETS)
    names = {name.rpartition(" ")[0] for name in BUDGETS}
    assert all(f"| {name} |" in text for name in names)


def test_the_compiler_names_what_is_wrong() -> None:
    with pytest.raises(AssertionError, match="no arguments of kv_write_kernel: \\['nonsense'\\]"):
        compile_all([Job("kv_write", "kv_write_kernel", "sm_90", {"nonsense": "*i32"}, {})])
