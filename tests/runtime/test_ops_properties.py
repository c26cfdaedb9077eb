"""The public operations on random steps in memory of others, against float64 oracles."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphattn import bounds, ops
from graphattn.kernels.attend import attend as attend_triton
from graphattn.kernels.attend_latent import attend_latent as attend_latent_triton
from graphattn.kernels.kv_write import kv_write as kv_write_triton
from graphattn.kernels.kv_write_ref import kv_write_ref
from graphattn.kernels.latent_write import latent_write as latent_write_triton
from graphattn.kernels.latent_write_ref import latent_write_ref
from tests.kernels import attend_case, latent_case
from tests.kernels.attend_case import Row, Setting
from tests.kernels.latent_case import Latent
from tests.runtime.op_case import (
    LAYOUTS,
    attend_args,
    attend_latent_args,
    foreign_table,
    fused,
)

FP8 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUICK = settings(max_examples=40, deadline=None)
INTERPRETED = settings(max_examples=6, deadline=None)  # Triton's interpreter: 0.3 s each
LONG = settings(max_examples=600, deadline=None)

page_sizes = st.sampled_from([1, 2, 3, 5, 16, 24, 64, 100, 256])
layouts = st.sampled_from(sorted(LAYOUTS))


@st.composite
def rows(draw: st.DrawFn, query_len: int) -> list[Row]:
    """Decode rows with missing drafts, prefill rows, done rows, padding rows, empty rows."""
    found = []
    for i in range(draw(st.integers(1, 4))):
        prefill = draw(st.booleans())
        places = draw(st.integers(0, 9)) if prefill else query_len
        found.append(
            Row(
                context=draw(st.sampled_from([0, 0, 1, 15, 16, 17, 40, 90])),
                places=places,
                tokens=draw(st.integers(0, places)),
                prefill=prefill,
                seed=10 * i,
                padding=draw(st.sampled_from([False, False, False, True])),
            )
        )
    return found


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Row], Setting]:
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 5]))
    size = draw(st.sampled_from([1, 1, 2, 3]))
    setting = Setting(
        heads=kv_heads * group,
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([1, 3, 8, 20, 32])),
        page_size=draw(page_sizes),
        dtype=draw(st.sampled_from(DTYPES)),
        kv_dtype=draw(st.sampled_from([None, None, FP8])),
        decode_query_len=draw(st.integers(1, 3)),
        window=draw(st.sampled_from([0, 0, 7])),
        softcap=draw(st.sampled_from([0.0, 0.0, 2.0])),
        sinks=draw(st.booleans()),
        tail=draw(st.integers(0, 3)),
        dcp_size=size,
        dcp_rank=draw(st.integers(0, size - 1)),
        interleave=draw(st.sampled_from([1, 3])),
        device="cpu",
    )
    if setting.kv_dtype is not None:
        setting = replace(setting, scales=draw(st.sampled_from(["", "head", "tensor"])))
    found = draw(rows(setting.decode_query_len))
    if not any(row.places for row in found):
        setting = replace(setting, tail=1)  # a step has places
    return found, setting


@st.composite
def calls(draw: st.DrawFn) -> attend_case.Case:
    """A call of `attend` whose tensors lie as others lay them."""
    case = attend_case.build(*draw(steps()))
    for name in ("k_pool", "v_pool"):
        case.args[name] = LAYOUTS[draw(layouts)](case.args[name])[1]
    if draw(st.booleans()):
        case.args["q"] = fused(case.args["q"])
    case.args["page_table"] = foreign_table(case.args["page_table"], draw(st.integers(0, 2)))
    return case


@st.composite
def latent_calls(draw: st.DrawFn) -> latent_case.LatentCase:
    """The same of `attend_latent`."""
    step_rows, setting = draw(steps())
    setting = replace(setting, softcap=0.0, sinks=False)
    latent = Latent(
        heads=draw(st.integers(1, 5)),
        value_dim=draw(st.sampled_from([1, 7, 16])),
        rope_dim=draw(st.sampled_from([1, 4])),
        setting=setting,
    )
    case = latent_case.build(step_rows, latent)
    case.args["pool"] = LAYOUTS[draw(layouts)](case.args["pool"].unsqueeze(1))[1].squeeze(1)
    if draw(st.booleans()):
        case.args["q"] = fused(case.args["q"])
    case.args["page_table"] = foreign_table(case.args["page_table"], draw(st.integers(0, 2)))
    return case


def attend_matches(case: attend_case.Case) -> None:
    ops.attend(**attend_args(case))
    attend_case.check(case)


def latent_matches(case: latent_case.LatentCase) -> None:
    ops.attend_latent(**attend_latent_args(case))
    latent_case.check(case)


@QUICK
@given(calls())
def test_attend(case: attend_case.Case) -> None:
    attend_matches(case)


@QUICK
@given(latent_calls())
def test_attend_latent(case: latent_case.LatentCase) -> None:
    latent_matches(case)


@INTERPRETED
@given(calls())
def test_attend_interpreted(case: attend_case.Case) -> None:
    attend_triton(*case.args.values())
    attend_case.check(case)


@INTERPRETED
@given(latent_calls())
def test_attend_latent_interpreted(case: latent_case.LatentCase) -> None:
    attend_latent_triton(*case.args.values())
    latent_case.check(case)


@pytest.mark.slow
@LONG
@given(calls(), latent_calls())
def test_attention_at_length(case: attend_case.Case, latent: latent_case.LatentCase) -> None:
    attend_matches(case)
    latent_matches(latent)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(calls(), latent_calls())
def test_attention_interpreted_at_length(
    case: attend_case.Case, latent: latent_case.LatentCase
) -> None:
    attend_triton(*case.args.values())
    attend_case.check(case)
    attend_latent_triton(*latent.args.values())
    latent_case.check(latent)


@st.composite
def writes(draw: st.DrawFn) -> dict[str, Any]:
    """Pools in foreign memory, and tokens for distinct entries of them or for none."""
    pages, heads, dim = draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(2, 9))
    page_size, dtype = draw(page_sizes), draw(st.sampled_from(DTYPES))
    held = draw(st.sampled_from([dtype, FP8]))
    entries = range(pages * page_size)
    slots = draw(st.lists(st.sampled_from(entries), max_size=6, unique=True))
    slots = draw(st.permutations([*slots, *[-1] * draw(st.integers(0, 3))]))
    shape, seed = (pages, heads, page_size, dim), torch.Generator().manual_seed(0)
    pool = torch.randn(shape, generator=seed).to(held)
    tokens = 9 * torch.randn(2, len(slots), heads, dim, generator=seed).to(dtype)
    tokens[:, [i for i, slot in enumerate(slots) if slot < 0]] = torch.nan
    scales = [0.25 + torch.rand(n, generator=seed) for n in (heads, 1, 2)]
    scaled = held == FP8 and draw(st.booleans())
    return {
        "tokens": [fused(x) if draw(st.booleans()) else x for x in tokens],
        "kv_slot": torch.tensor(slots, dtype=torch.int64),
        "layouts": [draw(layouts), draw(layouts)],
        "pool": pool,
        "scales": scales if scaled else [None] * 3,
        "value_dim": draw(st.integers(1, dim - 1)),
    }


def memory_bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


def writes_exactly(write: dict[str, Any], kv_write: Any, latent_write: Any) -> None:
    """Named entries, and nothing else of the memory that holds the pool."""
    (k, v), kv_slot, pool = write["tokens"], write["kv_slot"], write["pool"]
    k_scale, v_scale, latent_scale = write["scales"]
    got, wanted = ([LAYOUTS[name](pool.clone()) for name in write["layouts"]] for _ in range(2))
    kv_write(k, v, kv_slot, got[0][1], got[1][1], k_scale=k_scale, v_scale=v_scale)
    kv_write_ref(k, v, kv_slot, wanted[0][1], wanted[1][1], k_scale, v_scale)
    for (a, _), (b, _) in zip(got, wanted, strict=True):
        assert torch.equal(memory_bits(a), memory_bits(b))
    got, wanted = ([LAYOUTS[write["layouts"][0]](pool[:, :1].clone())] for _ in range(2))
    options = {"latent_scale": latent_scale, "value_dim": write["value_dim"]}
    latent_write(k[:, 0], kv_slot, got[0][1].squeeze(1), **options)
    latent_write_ref(k[:, 0], kv_slot, wanted[0][1].squeeze(1), **options)
    assert torch.equal(memory_bits(got[0][0]), memory_bits(wanted[0][0]))


@QUICK
@given(writes())
def test_write(write: dict[str, Any]) -> None:
    writes_exactly(write, ops.kv_write, ops.latent_write)


@INTERPRETED
@given(writes())
def test_write_interpreted(write: dict[str, Any]) -> None:
    writes_exactly(write, kv_write_triton, latent_write_triton)


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(writes())
def test_write_at_length(write: dict[str, Any]) -> None:
    writes_exactly(write, ops.kv_write, ops.latent_write)
    writes_exactly(write, kv_write_triton, latent_write_triton)


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[Row], Setting, str, bool]:
    step_rows, setting = draw(steps())
    size = draw(st.sampled_from([1, 2, 3, 4]))
    heads = size * setting.kv_heads * draw(st.integers(1, 2))
    setting = replace(setting, dcp_size=size, heads=heads, dim=draw(st.sampled_from([2, 8])))
    return step_rows, setting, draw(st.sampled_from(["packed", "scaled"])), draw(st.booleans())


def ranks_combine(step_rows: list[Row], setting: Setting, how: str, by_head: bool) -> None:
    """Every rank's partial, combined by the public operations, is attention over everything."""
    whole = attend_case.build(step_rows, replace(setting, dcp_size=1, dcp_rank=0))
    parts = [attend_args(attend_case.build(step_rows, s)) for s in attend_case.shards(setting)]
    for part in parts:
        part["sinks"] = None  # they join the union, not a part
        ops.attend(**part)
    sinks, W = whole.args["sinks"], setting.dcp_size
    outs, lses = [p["out"] for p in parts], [p["lse"] for p in parts]
    combine = _packed if how == "packed" else _scaled
    out = combine(outs, lses, sinks, W, by_head)
    lse = torch.logsumexp(torch.stack(lses), 0)
    if sinks is not None:
        used = int(whole.args["query_start"][-1])
        lse[:used] = torch.logaddexp(lse[:used], sinks)
    wanted, wanted_lse = whole.oracle()
    # A partial was stored once, and so was each of the W terms: as many roundings of the dtype.
    budget = attend_case.Budget.of(whole)
    largest = float(wanted.abs().max()) if wanted.numel() else 0.0
    rounding = (W + 2) * (torch.finfo(setting.dtype).eps * largest + budget.out)
    torch.testing.assert_close(out.double(), wanted, atol=rounding, rtol=budget.out_relative)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=(W + 1) * budget.lse, rtol=1e-6)


def _packed(
    outs: list[Tensor], lses: list[Tensor], sinks: Tensor | None, W: int, by_head: bool
) -> Tensor:
    tokens, heads, dim = outs[0].shape
    n = bounds.ceil_div(tokens * heads, W)
    per_lse = 4 // outs[0].itemsize
    sent = [torch.full((W, n, dim + per_lse), torch.nan, dtype=outs[0].dtype) for _ in outs]
    for out, lse, message in zip(outs, lses, sent, strict=True):
        ops.pack_partial(out, lse, message, by_head=by_head)
    merged = []
    for rank in range(W):
        piece = torch.full((n, dim), torch.nan, dtype=outs[0].dtype)
        own, share = sinks, heads // W
        if by_head and sinks is not None:
            own = sinks[rank * share : (rank + 1) * share]
        received = torch.stack([message[rank] for message in sent])
        ops.merge_packed(received, piece, sinks=own, first_row=0 if by_head else rank * n)
        merged.append(piece)
    if by_head:
        return torch.cat([m.view(tokens, heads // W, dim) for m in merged], 1)
    return torch.cat(merged)[: tokens * heads].view(tokens, heads, dim)


def _scaled(
    outs: list[Tensor], lses: list[Tensor], sinks: Tensor | None, W: int, by_head: bool
) -> Tensor:
    (tokens, heads, dim), slices = outs[0].shape, W if by_head else 1
    terms = []
    for out, lse in zip(outs, lses, strict=True):
        scaled = torch.full((slices, tokens, heads // slices, dim), torch.nan, dtype=out.dtype)
        ops.scale_partial(out, lse, torch.stack(lses), scaled, sinks=sinks)
        terms.append(scaled.transpose(0, 1).reshape(tokens, heads, dim).float())
    return torch.stack(terms).sum(0)


@QUICK
@given(groups())
def test_ranks_combine(group: tuple[list[Row], Setting, str, bool]) -> None:
    ranks_combine(*group)


@pytest.mark.slow
@LONG
@given(groups())
def test_ranks_combine_at_length(group: tuple[list[Row], Setting, str, bool]) -> None:
    ranks_combine(*group)


@QUICK
@given(st.data())
def test_greedy(data: st.DataObject) -> None:
    """Rows of wider logits, ties, infinities, NaN."""
    places, vocab = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 9))
    values = st.sampled_from([-math.inf, -1.0, 0.0, 2.0, math.inf, math.nan])
    row = st.lists(values, min_size=vocab + 2, max_size=vocab + 2)
    dtype = data.draw(st.sampled_from(DTYPES))
    table = [data.draw(row) for _ in range(places)]
    logits = torch.tensor(table, dtype=dtype).view(places, vocab + 2)[:, 1 : vocab + 1]
    sampled = torch.full((places,), 77, dtype=torch.int32)
    ops.greedy(logits, sampled)
    for got, values in zip(sampled.tolist(), logits.tolist(), strict=True):
        spoiled = any(math.isnan(x) for x in values) or max(values) == -math.inf
        assert got == (-1 if spoiled else values.index(max(values)))
