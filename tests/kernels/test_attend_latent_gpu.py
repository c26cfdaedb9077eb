"""Latent attention compiled for the GPU at hand, with the tiles of its table."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphattn.kernels import ops
from graphattn.kernels.tiles import arch_of, latent_tiles
from tests.kernels.attend_case import Row, Setting
from tests.kernels.latent_case import Latent, LatentCase, build, check

pytestmark = pytest.mark.gpu


def real(heads: int, query_len: int = 1, *, value_dim: int = 512, **options: object) -> Latent:
    """A layer cut as the runtime cuts it on this device: chunk, alignment, prefill block."""
    setting = replace(
        Setting(
            page_size=64, dtype=torch.bfloat16, decode_query_len=query_len, tail=5, device="cuda"
        ),
        **options,
    )
    tiles = latent_tiles(
        arch_of(torch.device("cuda")),
        head_dim=value_dim + 64,
        value_dim=value_dim,
        heads=heads,
        decode_query_len=query_len,
        page_size=setting.page_size,
        dtype=setting.dtype,
    )
    cut = {"chunk": tiles.chunk, "align": tiles.align, "prefill_block": tiles.prefill_block}
    return Latent(heads, value_dim, 64, replace(setting, **cut))


def run(rows: list[Row], latent: Latent, **options: bool) -> LatentCase:
    """Through the dispatched op: this is what a step calls."""
    case = build(rows, latent, **options)
    ops.attend_latent(*case.args.values())
    torch.cuda.synchronize()
    return case


def rows_for(query_len: int) -> list[Row]:
    return [
        Row(0, query_len, seed=10),
        Row(0, 40, prefill=True, seed=20),
        Row(64 - query_len, query_len, seed=30),
        Row(300, query_len, tokens=1, seed=40),
        Row(1100, query_len, seed=50),
        Row(100, 7, prefill=True, seed=60),
    ]


@pytest.mark.parametrize(("heads", "query_len"), [(16, 1), (16, 2), (16, 4), (128, 1), (7, 3)])
def test_tiles_of_the_table(heads: int, query_len: int) -> None:
    check(run(rows_for(query_len), real(heads, query_len)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    check(run(rows_for(2), real(16, 2, value_dim=128, dtype=dtype)))


@pytest.mark.parametrize("page_size", [1, 16, 24, 128])
def test_page_sizes(page_size: int) -> None:
    check(run(rows_for(2), real(128, 2, page_size=page_size)))


def test_splits_of_gathered_heads() -> None:
    """Longer than a chunk: two splits, merged."""
    latent = real(128)
    check(run([Row(latent.setting.chunk + 100, seed=10)], latent))


@pytest.mark.parametrize("prefill", [False, True])
def test_a_row_is_bitwise_the_same_in_every_batch(prefill: bool) -> None:
    latent = real(16, 2)
    row = Row(700, 30 if prefill else 2, prefill=prefill, seed=100)
    crowd = [Row(37 * i + 1, 2, seed=1000 + 10 * i) for i in range(20)]
    batches = [[row], [*crowd, row], [Row(5, 50, prefill=True, seed=7), row, *crowd]]
    results = []
    for rows in batches:
        case = run(rows, latent.with_options(tail=3 * len(rows)), reverse_items=len(rows) > 1)
        places = case.row_places[rows.index(row)]
        results.append((case.args["out"][places], case.args["lse"][places]))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


def test_a_captured_call_replays_with_other_contents() -> None:
    """Captured while every row is empty, replayed at real lengths: only contents differ."""
    case = run(rows_for(2), real(16, 2))
    ranges = {name: case.args[name].clone() for name in ("visible_end", "row_end")}
    for name in ranges:
        case.args[name].zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.attend_latent(*case.args.values())
    for name, values in ranges.items():
        case.args[name].copy_(values)
    for name in ("out", "lse", "partial_out", "partial_lse"):
        case.args[name].fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    check(case)
