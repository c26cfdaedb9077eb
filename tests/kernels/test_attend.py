"""The Triton attention kernels against the float64 oracle, interpreted where there is no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from graphattn.kernels import grid
from graphattn.kernels.attend import attend
from tests.kernels.attend_case import Case, Row, Setting, build, check, shards

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def run(rows: list[Row], setting: Setting, **options: Any) -> Case:
    case = build(rows, setting, **options)
    attend(*case.args.values())
    return case


def lengths(*values: int, places: int = 1) -> list[Row]:
    """Decode rows whose last token makes the sequence that long."""
    return [Row(n - places, places, seed=10 * n) for n in values]


GEOMETRIES = {
    "multi-head": Setting(heads=3, kv_heads=3, dim=16),
    "smollm2": Setting(heads=9, kv_heads=3, dim=64, dtype=BF16),
    "group of 4, head 80": Setting(heads=8, kv_heads=2, dim=80, page_size=32),
    "group of 5, head 96": Setting(heads=5, kv_heads=1, dim=96, dtype=FP16),
    "group of 7, head 128": Setting(heads=7, kv_heads=1, dim=128, dtype=BF16),
    "group of 16, head 256": Setting(heads=16, kv_heads=1, dim=256),
    "group of 1, head 40": Setting(heads=2, kv_heads=2, dim=40, dtype=BF16),
    "pages shorter than a block": Setting(page_size=8),
    "pages that divide nothing": Setting(page_size=5, dtype=BF16),
    "pages that are no multiple": Setting(page_size=24),
    "one entry per page": Setting(page_size=1),
}


@pytest.mark.parametrize("setting", GEOMETRIES.values(), ids=GEOMETRIES)
def test_decode_geometries(setting: Setting) -> None:
    page, chunk = setting.page_size, setting.chunk
    check(run(lengths(1, page, page + 1, chunk + 1), setting))


@pytest.mark.parametrize("page_size", [16, 6])
def test_boundary_lengths(page_size: int) -> None:
    """One entry, around a page, around a chunk, around two, and the last that needs no doubling."""
    s = Setting(page_size=page_size, heads=2, kv_heads=1)
    around = [1, *(n + d for n in (page_size, s.chunk, 2 * s.chunk) for d in (-1, 0, 1))]
    check(run(lengths(*around, s.chunk * s.max_splits), s))


@pytest.mark.parametrize("length", [1, 16, 129, 300])
def test_splits_are_bounded_at_every_length(length: int) -> None:
    """A capture made with a short context replays at any length: chunks grow, splits do not.

    Seen elsewhere: a graph captured with a short context had frozen another code path.
    """
    case = run(lengths(length), Setting(heads=2, kv_heads=1))
    assert 1 <= int(case.args["row_splits"][0]) <= case.setting.max_splits
    check(case)


OPTIONS = {
    "window": {"window": 19},
    "window of one": {"window": 1},
    "soft-cap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "all": {"window": 19, "softcap": 3.0, "sinks": True, "dtype": BF16},
}
MIXED = [
    Row(40, 3, seed=10),
    Row(0, 13, prefill=True, seed=20),
    Row(0, 1, seed=30),
    Row(30, 7, prefill=True, seed=40),
    Row(17, 2, seed=50),
]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_in_decode_and_prefill(options: dict[str, Any]) -> None:
    check(run(MIXED, Setting(decode_query_len=3, heads=3, kv_heads=1, **options)))


def test_places_without_a_token() -> None:
    """Missing drafts, a finished slot, padding rows and the tail are exactly (0, -inf).

    Seen elsewhere: padded rows left unwritten or 0/0, whose NaN reached real rows through a maximum
    over the whole tensor; a length of 0 that read page_table[-1].
    """
    rows = [
        Row(5, 4, tokens=2, seed=10),
        Row(9, 4, tokens=0, seed=20),
        Row(0, 0, padding=True),
        Row(0, 7, prefill=True, tokens=4, seed=30),
        Row(0, 4, padding=True),
        Row(33, 4, seed=40),
    ]
    case = run(rows, Setting(decode_query_len=4, tail=3))
    check(case)
    empty = case.args["visible_end"] == 0
    assert int(empty.sum()) == 2 + 4 + 3 + 4 + 3
    assert (case.args["lse"][empty] == -torch.inf).all()


def test_sinks_of_places_without_a_token() -> None:
    rows = [Row(5, 2, tokens=1, seed=10), Row(2, 6, prefill=True, tokens=3, seed=20)]
    case = run(rows, Setting(decode_query_len=2, sinks=True, tail=2))
    check(Case(case.setting, rows, case.args))
    lse, sinks = case.args["lse"], case.args["sinks"]
    assert torch.allclose(lse[[1, 5, 6, 7]], sinks.expand(4, -1), rtol=1e-6)
    assert (lse[8:] == -torch.inf).all()


@pytest.mark.parametrize("live", range(5))
def test_every_live_count_of_a_bucket(live: int) -> None:
    """Seen elsewhere: split counts planned for fewer rows than the bucket has."""
    rows = [*lengths(*range(20, 20 + live)), *[Row(0, 0, padding=True)] * (4 - live)]
    check(run(rows, Setting(heads=2, kv_heads=1, tail=4 - live)))


def test_empty_and_short_rows_with_drafts() -> None:
    """Seen elsewhere: lengths [0, 2] with queries [1, 4] and 2 padded tokens merged to NaN."""
    rows = [Row(0, 1, tokens=0), Row(0, 4, tokens=2, seed=10)]
    case = run(rows, Setting(decode_query_len=4, tail=2))
    check(case)
    assert case.args["lse"].isfinite().any(1).tolist() == [False, True, True, *[False] * 4]


def test_more_rows_than_one_tile_holds() -> None:
    """Sixteen heads times five places are 80 rows; the tile of 64 is repeated."""
    rows = [*lengths(40, 7, places=5), Row(3, 9, prefill=True, seed=90)]
    check(run(rows, Setting(heads=16, kv_heads=1, decode_query_len=5, prefill_block=3)))


@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (2, 3), (4, 1), (4, 3)])
def test_ranks_merge_to_the_whole(world: int, interleave: int) -> None:
    """Each rank equals the oracle of its share, and the union of shares equals no sharding at all.

    Lengths 1 and 2 leave ranks empty, and a window may end before a rank's first entry.
    """
    rows = [
        *(Row(n, 3, seed=10 * n + 10) for n in (0, 1, 38)),
        Row(11, 3, tokens=1, seed=70),
        Row(5, 8, prefill=True, seed=80),
    ]
    whole = Setting(
        decode_query_len=3, heads=2, kv_heads=1, page_size=4, window=7 * (interleave == 3)
    )
    setting = replace(whole, dcp_size=world, interleave=interleave)
    cases = [run(rows, shard) for shard in shards(setting)]
    for case in cases:
        check(case)
    out, lse = _union(
        torch.stack([case.args["out"].double() for case in cases]),
        torch.stack([case.args["lse"].double() for case in cases]),
    )
    check(build(rows, whole), out, lse)


def _union(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of shares [W, ...]; empty shares have weight 0."""
    lse = torch.logsumexp(lses, 0)
    weights = torch.where(lses == -torch.inf, 0.0, torch.exp(lses - lse))
    return (weights[..., None] * outs).sum(0), lse


BATCHES = {
    "alone": lambda row: ([row], {}),
    "second of four": lambda row: ([*lengths(50), row, *lengths(1, 33)], {}),
    "with prefill": lambda row: ([Row(4, 11, prefill=True, seed=7), row], {}),
    "in a larger bucket": lambda row: ([row, Row(0, 0, padding=True)], {"tail": 9}),
}
INVARIANT_ROWS = {
    "decode": Row(61, 3, seed=100),
    "decode with a missing draft": Row(61, 3, tokens=2, seed=100),
    "prefill": Row(20, 11, prefill=True, seed=100),
}


@pytest.mark.parametrize("row", INVARIANT_ROWS.values(), ids=INVARIANT_ROWS)
def test_a_row_is_bitwise_the_same_in_every_batch(row: Row) -> None:
    setting = Setting(decode_query_len=3, heads=3, kv_heads=1, dtype=BF16, window=45)
    results = []
    for batch in BATCHES.values():
        rows, change = batch(row)
        case = run(rows, replace(setting, **change), reverse_items=len(rows) > 1)
        places = case.row_places[rows.index(row)]
        results.append((case.args["out"][places], case.args["lse"][places]))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@pytest.mark.skipif(not grid.INTERPRETED, reason="the grid of a GPU follows from the kernel")
def test_the_number_of_programs_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(decode_query_len=3, heads=4, kv_heads=2, tail=3)
    wanted = run(MIXED, setting).args
    for programs in (1, 50):
        monkeypatch.setattr(grid, "INTERPRETED_PROGRAMS", programs)
        got = run(MIXED, setting).args
        assert torch.equal(got["out"], wanted["out"])
        assert torch.equal(got["lse"], wanted["lse"])


def test_nan_of_one_request_stays_with_it() -> None:
    """A request whose KV is NaN must show it, and must not touch its neighbours."""
    rows = [*lengths(20, 30), Row(2, 6, prefill=True, seed=90)]
    clean = run(rows, Setting())
    case = build(rows, Setting())
    pages = case.args["page_table"][case.args["slot_of_row"][1]]
    case.args["v_pool"][pages[0], :, 3] = torch.nan
    case.args["k_pool"][pages[1], :, 1] = torch.nan
    attend(*case.args.values())
    assert case.args["out"][1].isnan().all()
    assert case.args["lse"][1].isnan().all()
    others = [0, *range(2, 8)]
    assert torch.equal(case.args["out"][others], clean.args["out"][others])


LAYOUTS = {
    "q with heads first": {"q": (1, 0, 2)},
    "pools with entries before heads": {"k_pool": (0, 2, 1, 3), "v_pool": (0, 2, 1, 3)},
    "pools with heads first": {"k_pool": (1, 0, 2, 3)},
    "pools with entries first": {"v_pool": (2, 1, 0, 3)},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_outer_strides(layout: dict[str, tuple[int, ...]]) -> None:
    """Caller-owned memory in another order: same numbers, bitwise."""
    rows = [*lengths(37), Row(2, 6, prefill=True, seed=90)]
    wanted = run(rows, Setting(page_size=8)).args
    case = build(rows, Setting(page_size=8))
    for name, order in layout.items():
        tensor = case.args[name]
        inverse = [order.index(i) for i in range(len(order))]
        case.args[name] = tensor.permute(order).contiguous().permute(inverse)
        assert case.args[name].stride() != tensor.stride()
    attend(*case.args.values())
    assert torch.equal(case.args["out"], wanted["out"])


def test_a_pure_decode_step_has_no_prefill_items() -> None:
    case = build(lengths(20, 3), Setting())
    wanted = run(lengths(20, 3), Setting()).args["out"]
    case.args["prefill_items"] = case.args["prefill_count"] = None
    attend(*case.args.values())
    assert torch.equal(case.args["out"], wanted)


WRONG = {
    "q": lambda t: t[0],
    "k_pool": lambda t: t[..., :-1],
    "v_pool": lambda t: t.to(FP16),
    "page_table": lambda t: t.long(),
    "slot_of_row": lambda t: t[:-1],
    "query_start": lambda t: t[:-1],
    "visible_start": lambda t: t.long(),
    "visible_end": lambda t: t[:-1],
    "row_begin": lambda t: t[None],
    "row_end": lambda t: t.float(),
    "row_chunk": lambda t: t[:-1],
    "row_splits": lambda t: t.repeat_interleave(2)[::2],
    "decode_items": lambda t: t[:-1],
    "decode_count": lambda t: t[0],
    "prefill_items": lambda t: None,
    "prefill_count": lambda t: t.long(),
    "sinks": lambda t: t.double(),
    "partial_out": lambda t: t[..., 0],
    "partial_lse": lambda t: t.double(),
    "out": lambda t: t.transpose(0, 1),
    "lse": lambda t: t[:, 0],
    "decode_query_len": lambda n: 0,
    "prefill_block": lambda n: 0,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named_and_nothing_is_written(name: str) -> None:
    case = build(lengths(20, 3), Setting(sinks=True))
    out = case.args["out"]
    case.args[name] = WRONG[name](case.args[name])
    with pytest.raises(ValueError, match=f"^{name}: "):
        attend(*case.args.values())
    assert out.isnan().all()
