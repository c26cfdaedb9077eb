"""The Triton kernels of latent attention against the float64 oracle, interpreted without a GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from graphattn.kernels import grid
from graphattn.kernels.attend_latent import attend_latent
from graphattn.kernels.tiles import latent_tiles
from tests.kernels.attend_case import Row, Setting, shards
from tests.kernels.latent_case import Latent, LatentCase, build, check, union

BF16, FP16 = torch.bfloat16, torch.float16
DEEPSEEK: dict[str, Any] = {"head_dim": 576, "value_dim": 512, "page_size": 64, "dtype": BF16}


def run(rows: list[Row], latent: Latent, **options: bool) -> LatentCase:
    case = build(rows, latent, **options)
    attend_latent(*case.args.values())
    return case


def lengths(*values: int, places: int = 1) -> list[Row]:
    """Decode rows whose last token makes the sequence that long."""
    return [Row(n - places, places, seed=10 * n) for n in values]


MIXED = [
    Row(40, 3, seed=10),
    Row(0, 13, prefill=True, seed=20),
    Row(0, 1, seed=30),
    Row(30, 7, prefill=True, seed=40),
    Row(17, 2, seed=50),
]
DRAFTS = Setting(decode_query_len=3)

GEOMETRIES = {
    "miniature": Latent(4, 32, 16, DRAFTS),
    "no power of two": Latent(3, 48, 24, replace(DRAFTS, page_size=32)),
    "smaller than a dot": Latent(1, 8, 4, replace(DRAFTS, dtype=BF16)),
    "DeepSeek, 16 heads": Latent(16, 512, 64, replace(DRAFTS, page_size=64, dtype=BF16)),
    "pages shorter than a block": Latent(2, 32, 16, replace(DRAFTS, page_size=8, dtype=FP16)),
    "pages that divide nothing": Latent(2, 32, 16, replace(DRAFTS, page_size=5, dtype=BF16)),
    "one entry per page": Latent(2, 32, 16, replace(DRAFTS, page_size=1)),
    "window": Latent(2, 32, 16, replace(DRAFTS, window=19)),
}


@pytest.mark.parametrize("latent", GEOMETRIES.values(), ids=GEOMETRIES)
def test_geometries(latent: Latent) -> None:
    check(run(MIXED, latent))


def test_gathered_heads() -> None:
    """128 heads fill several tiles of one place, in decode and in prefill."""
    rows = [Row(33, 2, seed=10), Row(2, 2, prefill=True, seed=20)]
    setting = Setting(decode_query_len=2, prefill_block=1, max_splits=2)
    check(run(rows, Latent(128, 32, 16, setting)))


@pytest.mark.parametrize("page_size", [16, 6])
def test_boundary_lengths(page_size: int) -> None:
    """One entry, around a page, around a chunk, and the last that needs no doubling."""
    s = Setting(page_size=page_size)
    around = [1, *(n + d for n in (page_size, s.chunk) for d in (-1, 0, 1))]
    check(
        run(
            lengths(*around, s.chunk * s.max_splits, s.chunk * s.max_splits + 9),
            Latent(1, 32, 16, s),
        )
    )


def test_places_without_a_token() -> None:
    """Missing drafts, a finished slot, padding rows and the tail are exactly (0, -inf)."""
    rows = [
        Row(5, 4, tokens=2, seed=10),
        Row(9, 4, tokens=0, seed=20),
        Row(0, 0, padding=True),
        Row(0, 7, prefill=True, tokens=4, seed=30),
        Row(0, 4, padding=True),
        Row(33, 4, seed=40),
        Row(40, 4, tokens=2, seed=50),  # beside tokens that see whole blocks
        Row(35, 5, prefill=True, tokens=4, seed=60),
    ]
    case = run(rows, Latent(2, 32, 16, Setting(decode_query_len=4, tail=3)))
    check(case)
    assert int((case.args["visible_end"] == 0).sum()) == 2 + 4 + 3 + 4 + 2 + 1 + 3


@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (4, 3)])
def test_ranks_merge_to_the_whole(world: int, interleave: int) -> None:
    """Each rank equals the oracle of its share, and the union of shares equals no sharding at all.

    Lengths 1 and 2 leave ranks empty.
    """
    rows = [
        *(Row(n, 3, seed=10 * n + 10) for n in (0, 38)),
        Row(11, 3, tokens=1, seed=70),
        Row(5, 8, prefill=True, seed=80),
    ]
    whole = Latent(2, 32, 16, replace(DRAFTS, page_size=4))
    setting = replace(whole.setting, dcp_size=world, interleave=interleave)
    cases = [run(rows, replace(whole, setting=shard)) for shard in shards(setting)]
    for case in cases:
        check(case)
    check(build(rows, whole), *union(cases))


INVARIANT_ROWS = {
    "decode": Row(61, 3, seed=100),
    "decode with a missing draft": Row(61, 3, tokens=2, seed=100),
    "prefill": Row(20, 11, prefill=True, seed=100),
}


@pytest.mark.parametrize("row", INVARIANT_ROWS.values(), ids=INVARIANT_ROWS)
def test_a_row_is_bitwise_the_same_in_every_batch(row: Row) -> None:
    batches: list[tuple[list[Row], dict[str, Any]]] = [
        ([row], {}),
        ([*lengths(50), row, *lengths(1, 33)], {}),
        ([Row(4, 11, prefill=True, seed=7), row, Row(0, 0, padding=True)], {"tail": 9}),
    ]
    results = []
    for rows, change in batches:
        latent = Latent(3, 32, 16, replace(DRAFTS, dtype=BF16, **change))
        case = run(rows, latent, reverse_items=len(rows) > 1)
        places = case.row_places[rows.index(row)]
        results.append((case.args["out"][places], case.args["lse"][places]))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@pytest.mark.skipif(not grid.INTERPRETED, reason="the grid of a GPU follows from the kernel")
def test_the_number_of_programs_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    latent = Latent(4, 32, 16, replace(DRAFTS, tail=3))
    wanted = run(MIXED, latent).args
    for programs in (1, 50):
        monkeypatch.setattr(grid, "INTERPRETED_PROGRAMS", programs)
        got = run(MIXED, latent).args
        assert torch.equal(got["out"], wanted["out"])
        assert torch.equal(got["lse"], wanted["lse"])


def test_nan_of_one_request_stays_with_it() -> None:
    """A request whose entries are NaN must show it, and must not touch its neighbours."""
    rows = [*lengths(20, 30), Row(2, 6, prefill=True, seed=90)]
    clean = run(rows, Latent())
    case = build(rows, Latent())
    page = case.args["page_table"][case.args["slot_of_row"][1], 0]
    case.args["pool"][page, 3] = torch.nan
    attend_latent(*case.args.values())
    assert case.args["out"][1].isnan().all()
    assert case.args["lse"][1].isnan().all()
    others = [0, *range(2, 8)]
    assert torch.equal(case.args["out"][others], clean.args["out"][others])


@pytest.mark.parametrize("part", ["values", "rope key"])
def test_both_parts_of_an_entry_past_the_end_may_be_nan(part: str) -> None:
    """A page's stale rest: whatever block is loaded, the end of a range lies in its middle."""
    rows = [*lengths(20), Row(2, 6, prefill=True, seed=90)]
    case = build(rows, Latent())
    stale = case.args["pool"].isnan()
    stale[..., slice(None, 32) if part == "values" else slice(32, None)] = False
    assert stale.any()
    case.args["pool"].nan_to_num_(1e4)[stale] = torch.nan
    attend_latent(*case.args.values())
    check(case)


LAYOUTS = {
    "q with heads first": ("q", lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)),
    "q cut out of a projection": ("q", lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]]),
    "pool of one layer of many": ("pool", lambda t: torch.stack([t * 2, t], 1)[:, 1]),
    "pool with entries first": ("pool", lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)),
    "wider entries": ("pool", lambda t: torch.cat([t, t[..., :3]], -1)[..., : t.shape[-1]]),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_outer_strides(layout: tuple[str, Any]) -> None:
    """Caller-owned memory in another order: same numbers, bitwise."""
    name, change = layout
    rows = [*lengths(37), Row(2, 6, prefill=True, seed=90)]
    latent = Latent(2, 32, 16, Setting(page_size=8))
    wanted = run(rows, latent).args
    case = build(rows, latent)
    case.args[name] = change(case.args[name])
    assert not case.args[name].is_contiguous()
    attend_latent(*case.args.values())
    assert torch.equal(case.args["out"], wanted["out"])
    assert torch.equal(case.args["lse"], wanted["lse"])


def test_a_pure_decode_step_has_no_prefill_items() -> None:
    case = build(lengths(20, 3), Latent())
    wanted = run(lengths(20, 3), Latent()).args["out"]
    case.args["prefill_items"] = case.args["prefill_count"] = None
    attend_latent(*case.args.values())
    assert torch.equal(case.args["out"], wanted)


WRONG: dict[str, Any] = {
    "q": lambda t: t[0],
    "pool": lambda t: t[..., :-1],
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
    "partial_out": lambda t: t[..., :-1],
    "partial_lse": lambda t: t.double(),
    "out": lambda t: t.transpose(0, 1),
    "lse": lambda t: t[:, 0],
    "decode_query_len": lambda n: 0,
    "prefill_block": lambda n: 0,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named_and_nothing_is_written(name: str) -> None:
    case = build(lengths(20, 3), Latent())
    out = case.args["out"]
    case.args[name] = WRONG[name](case.args[name])
    with pytest.raises(ValueError, match=f"^{name}: "):
        attend_latent(*case.args.values())
    assert out.isnan().all()


def test_an_entry_without_a_rope_key_is_refused() -> None:
    case = build(lengths(20), Latent(1, 32, 16))
    case.args["out"] = torch.full((1, 1, 48), torch.nan)
    case.args["partial_out"] = torch.full((1, 4, 1, 1, 48), torch.nan)
    with pytest.raises(ValueError, match=r"^head_dim - value_dim: wanted at least 1, got 0"):
        attend_latent(*case.args.values())


@pytest.mark.parametrize("query_len", [1, 2, 5])
@pytest.mark.parametrize("heads", [1, 2, 16, 128])
def test_partial_traffic_is_at_most_an_eighth_of_kv_traffic(heads: int, query_len: int) -> None:
    """Partials are written and read once, fp32; the entries of a chunk are read once, 2 bytes."""
    tiles = latent_tiles("sm_90", heads=heads, decode_query_len=query_len, **DEEPSEEK)
    partial = 2 * 4 * (512 + 1) * heads * query_len
    assert partial / (2 * 576 * tiles.chunk) <= 1 / 8
    assert tiles.chunk % tiles.align == 0


def test_chunks_of_gathered_heads() -> None:
    tiles = latent_tiles("sm_90", heads=128, decode_query_len=1, **DEEPSEEK)
    assert tiles.chunk >= 4096
    assert tiles.decode.block_m == 64


BAD_GEOMETRIES: dict[str, dict[str, Any]] = {
    "heads: wanted at most 128, got 129": {"heads": 129},
    "heads: wanted at least 1, got 0": {"heads": 0},
    "value_dim: wanted at most 512, got 513": {"value_dim": 513},
    "head_dim - value_dim: wanted at most 64, got 65": {"head_dim": 577},
    "decode_query_len: wanted at least 1, got 0": {"decode_query_len": 0},
    "dtype: float32 has tiles for latents of at most 128 values": {"dtype": torch.float32},
    "dtype: wanted bfloat16, float16 or float32": {"dtype": torch.int8},
}


@pytest.mark.parametrize("message", BAD_GEOMETRIES)
def test_a_geometry_without_a_tile_is_named(message: str) -> None:
    geometry = {"heads": 16, "decode_query_len": 1, **DEEPSEEK, **BAD_GEOMETRIES[message]}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        latent_tiles("sm_90", **geometry)
