"""The attention kernels compiled for the GPU at hand, with the tiles of its table."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphattn.kernels import ops
from graphattn.kernels.tiles import arch_of, attention_tiles
from tests.kernels.attend_case import Case, Row, Setting, build, check

pytestmark = pytest.mark.gpu


def real(group: int, dim: int, query_len: int = 1, **options: object) -> Setting:
    """A setting cut as the runtime cuts it on this device: chunk, alignment, prefill block."""
    setting = Setting(
        heads=2 * group,
        kv_heads=2,
        dim=dim,
        page_size=64,
        dtype=torch.bfloat16,
        decode_query_len=query_len,
        device="cuda",
    )
    setting = replace(setting, **options)
    tiles = attention_tiles(
        arch_of(torch.device("cuda")),
        head_dim=dim,
        group=group,
        decode_query_len=query_len,
        page_size=setting.page_size,
        dtype=setting.dtype,
    )
    return replace(setting, chunk=tiles.chunk, align=tiles.align, prefill_block=tiles.prefill_block)


def run(rows: list[Row], setting: Setting, **options: bool) -> Case:
    """Through the dispatched op: this is what a step calls."""
    case = build(rows, setting, **options)
    ops.attend(*case.args.values())
    torch.cuda.synchronize()
    return case


def rows_for(query_len: int) -> list[Row]:
    return [
        Row(0, query_len, seed=10),
        Row(0, 200, prefill=True, seed=20),
        Row(64 - query_len, query_len, seed=30),
        Row(300, query_len, tokens=1, seed=40),
        Row(1100, query_len, seed=50),
        Row(100, 70, prefill=True, seed=60),
    ]


@pytest.mark.parametrize(
    ("group", "dim", "query_len"),
    [(1, 64, 1), (3, 64, 4), (4, 128, 1), (8, 128, 4), (5, 80, 2), (7, 96, 1), (16, 256, 4)],
    ids=str,
)
def test_tiles_of_the_table(group: int, dim: int, query_len: int) -> None:
    check(run(rows_for(query_len), real(group, dim, query_len, tail=5)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_other_dtypes(dtype: torch.dtype, dim: int) -> None:
    check(run(rows_for(2), real(4, dim, 2, dtype=dtype)))


@pytest.mark.parametrize("page_size", [1, 16, 24, 128])
def test_page_sizes(page_size: int) -> None:
    check(run(rows_for(2), real(4, 128, 2, page_size=page_size)))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_options(dim: int) -> None:
    check(run(rows_for(2), real(4, dim, 2, window=150, softcap=20.0, sinks=True)))


@pytest.mark.parametrize("prefill", [False, True])
def test_a_row_is_bitwise_the_same_in_every_batch(prefill: bool) -> None:
    setting = real(4, 128, 2)
    row = Row(700, 90 if prefill else 2, prefill=prefill, seed=100)
    crowd = [Row(37 * i + 1, 2, seed=1000 + 10 * i) for i in range(20)]
    batches = [[row], [*crowd, row], [Row(5, 130, prefill=True, seed=7), row, *crowd]]
    results = []
    for rows in batches:
        case = run(rows, replace(setting, tail=3 * len(rows)), reverse_items=len(rows) > 1)
        places = case.row_places[rows.index(row)]
        results.append((case.args["out"][places], case.args["lse"][places]))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


def test_a_captured_call_replays_with_other_contents() -> None:
    """Captured while every row is empty, replayed at real lengths: only contents differ."""
    case = run(rows_for(2), real(4, 128, 2, tail=5))
    ranges = {name: case.args[name].clone() for name in ("visible_end", "row_end")}
    for name in ranges:
        case.args[name].zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.attend(*case.args.values())
    for name, values in ranges.items():
        case.args[name].copy_(values)
    for name in ("out", "lse", "partial_out", "partial_lse"):
        case.args[name].fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    check(case)
