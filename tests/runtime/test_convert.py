"""Metadata of others and ours, against plain Python and round trips."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphattn import ConfigError, convert
from graphattn._capture.audit import audit
from graphattn._capture.host import HostGraph
from graphattn.convert import PagedIndices

HUGE = 2**30  # a page id that nobody sees
QUICK = settings(max_examples=80, deadline=None)


def ints(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


@st.composite
def steps(draw: st.DrawFn) -> dict[str, Any]:
    """Rows with query and context lengths, empty and padding rows, pages in a table of slots."""
    B, page_size = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 3, 7, 16, 48]))
    query = [draw(st.sampled_from([0, 0, 1, 1, 2, 5])) for _ in range(B)]
    context = [draw(st.integers(0, 40)) for _ in range(B)]
    slots = draw(st.permutations(range(B + 1)))[:B]
    slots = [s if n or draw(st.booleans()) else -1 for s, n in zip(slots, query, strict=True)]
    columns = -(-max(c + n for c, n in zip(context, query, strict=True)) // page_size)
    columns = max(1, columns + draw(st.integers(0, 2)))
    pages = draw(st.permutations(range((B + 1) * columns)))
    return {
        "query": query,
        "context": context,
        "slots": slots,
        "page_size": page_size,
        "table": [list(pages[s * columns : (s + 1) * columns]) for s in range(B + 1)],
        "tail": draw(st.integers(0, 3)),
        "dtype": draw(st.sampled_from([torch.int32, torch.int64])),
    }


@QUICK
@given(steps())
def test_varlen_and_slot_mapping(step: dict[str, Any]) -> None:
    query, context, dtype = step["query"], step["context"], step["dtype"]
    starts = [0, *accumulate(query)]
    T = starts[-1] + step["tail"]
    rows = [r for r, n in enumerate(query) for _ in range(n)]
    place = [context[r] + j for r, n in enumerate(query) for j in range(n)]
    padding = [-1] * step["tail"]
    table = [step["table"][s] if s >= 0 else [0] * len(step["table"][0]) for s in step["slots"]]
    page_size = step["page_size"]
    entries = [
        table[r][p // page_size] * page_size + p % page_size
        for r, p in zip(rows, place, strict=True)
    ]

    cu = convert.cu_seqlens(ints(query, dtype))
    assert cu.tolist() == starts
    cu = cu.to(dtype)
    used = convert.seqused(ints(query, dtype), ints(context, dtype))
    assert used.tolist() == [c + n if n else 0 for c, n in zip(context, query, strict=True)]
    assert convert.query_lengths(cu).tolist() == query
    back = convert.context_lengths(cu, used.to(dtype)).tolist()
    assert back == [c if n else 0 for c, n in zip(context, query, strict=True)]
    row = convert.rows_of_tokens(cu, T)
    assert row.tolist() == rows + padding
    position = convert.positions(cu, ints(context, dtype), T)
    assert position.tolist() == place + [0] * step["tail"]
    block_table = convert.block_table_of_rows(
        ints(step["table"], dtype), ints(step["slots"], dtype)
    )
    assert block_table.tolist() == table
    slots = convert.slot_mapping(block_table.to(dtype), row.to(dtype), position, page_size)
    assert slots.tolist() == entries + padding
    assert torch.equal(convert.kv_slots(slots.to(dtype)), slots)


@QUICK
@given(steps())
def test_paged_indices_and_back(step: dict[str, Any]) -> None:
    lengths, page_size, dtype = step["context"], step["page_size"], step["dtype"]
    table = step["table"][: len(lengths)]
    counts = [-(-n // page_size) for n in lengths]
    seen = [page for row, n in zip(table, counts, strict=True) for page in row[:n]]
    poisoned = ints(
        [row[:n] + [HUGE] * (len(row) - n) for row, n in zip(table, counts, strict=True)], dtype
    )
    most = len(seen) + step["tail"]
    paged = convert.paged_indices(poisoned, ints(lengths, dtype), page_size, max_indices=most)
    assert paged.indptr.tolist() == [0, *accumulate(counts)]
    assert paged.indices.tolist() == seen + [0] * step["tail"]
    last = [n - (c - 1) * page_size if c else 0 for n, c in zip(lengths, counts, strict=True)]
    assert paged.last_page_len.tolist() == last

    paged = PagedIndices(*(t.to(dtype) for t in paged))
    assert convert.paged_lengths(paged, page_size).tolist() == lengths
    back = convert.block_table_from_pages(paged, len(table[0]))
    wanted = [row[:n] + [0] * (len(row) - n) for row, n in zip(table, counts, strict=True)]
    assert back.tolist() == wanted


@QUICK
@given(steps())
def test_round_trip_of_a_default_bound(step: dict[str, Any]) -> None:
    """Without a bound of the caller there is room for every page that the table can name."""
    lengths = [len(row) * step["page_size"] for row in step["table"]]
    table = ints(step["table"])
    paged = convert.paged_indices(table, ints(lengths), step["page_size"])
    assert paged.indices.shape == (table.numel(),)
    assert torch.equal(convert.block_table_from_pages(paged, table.shape[1]), table)


def test_what_does_not_fit_is_cut() -> None:
    """Contents are the caller's: nothing is written or read out of bounds for wrong ones."""
    table = ints([[5, 6], [7, 8]])
    paged = convert.paged_indices(table, ints([9, 3]), 2, max_indices=3)
    assert paged.indptr.tolist() == [0, 2, 4]
    assert paged.indices.tolist() == [5, 6, 7]
    assert paged.last_page_len.tolist() == [2, 1]
    assert convert.block_table_from_pages(paged, 3).tolist() == [[5, 6, 0], [7, 0, 0]]
    assert convert.block_table_from_pages(paged, 1).tolist() == [[5], [7]]
    empty = paged._replace(indices=paged.indices[:0])
    assert convert.block_table_from_pages(empty, 1).tolist() == [[0], [0]]
    assert convert.kv_slots(ints([3, -100, 0])).tolist() == [3, -1, 0]


def conversions() -> tuple[dict[str, Tensor], Any]:
    """Every conversion into buffers of the caller, in one program over fixed memory."""
    fixed = {
        "query": ints([1, 0, 3]),
        "context": ints([6, 0, 1]),
        "slots": ints([2, -1, 0]),
        "table": torch.arange(12, dtype=torch.int32).view(3, 4),
    }

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full(shape, -77, dtype=dtype)

    out = {
        "cu": new(4),
        "used": new(3),
        "query": new(3),
        "context": new(3),
        "row": new(6),
        "position": new(6, dtype=torch.int64),
        "block_table": new(3, 4),
        "lengths": new(3),
        "pages": new(3, 4),
        "slot": new(6, dtype=torch.int64),
        "kv_slot": new(6, dtype=torch.int64),
    }
    paged = PagedIndices(new(4), new(9), new(3))

    def program() -> None:
        convert.cu_seqlens(fixed["query"], out=out["cu"])
        convert.seqused(fixed["query"], fixed["context"], out=out["used"])
        convert.query_lengths(out["cu"], out=out["query"])
        convert.context_lengths(out["cu"], out["used"], out=out["context"])
        convert.rows_of_tokens(out["cu"], 6, out=out["row"])
        convert.positions(out["cu"], out["context"], 6, out=out["position"])
        convert.block_table_of_rows(fixed["table"], fixed["slots"], out=out["block_table"])
        convert.paged_indices(out["block_table"], out["used"], 2, out=paged)
        convert.paged_lengths(paged, 2, out=out["lengths"])
        convert.block_table_from_pages(paged, 4, out=out["pages"])
        convert.slot_mapping(out["block_table"], out["row"], out["position"], 2, out=out["slot"])
        convert.kv_slots(out["slot"], out=out["kv_slot"])

    return fixed | {f"out.{n}": t for n, t in out.items()} | paged._asdict(), program


def test_conversions_are_captured() -> None:
    """Same contents as eager, for contents that the capture did not see."""
    tensors, program = conversions()
    graph = HostGraph("convert")
    graph.capture(program)
    tensors["query"].copy_(ints([2, 1, 2]))
    tensors["context"].copy_(ints([0, 5, 4]))
    tensors["slots"].copy_(ints([1, 0, 2]))
    graph.replay()
    replayed = {name: t.clone() for name, t in tensors.items()}
    program()
    for name, t in tensors.items():
        assert torch.equal(replayed[name], t), name
        assert not (t == -77).any(), name
    assert torch.equal(tensors["out.lengths"], tensors["out.used"])


def test_conversions_hold_nothing_that_a_graph_cannot() -> None:
    _, program = conversions()
    report = audit(program)
    assert report.findings == (), str(report)


WRONG = {
    "query_len": lambda: convert.cu_seqlens(torch.zeros(3)),
    "cu_seqlens": lambda: convert.context_lengths(ints([0, 1]), ints([1, 2])),
    "context_len": lambda: convert.seqused(ints([1, 2]), ints([1])),
    "tokens": lambda: convert.rows_of_tokens(ints([0, 1]), -1),
    "slot_of_row": lambda: convert.block_table_of_rows(ints([[1]]), ints([[1]])),
    "block_table": lambda: convert.paged_indices(ints([1]), ints([1]), 2),
    "lengths": lambda: convert.paged_indices(ints([[1]]), ints([1, 2]), 2),
    "page_size": lambda: convert.paged_indices(ints([[1]]), ints([1]), 0),
    "max_indices": lambda: convert.paged_indices(ints([[1]]), ints([1]), 2, max_indices=-1),
    r"out\.indices": lambda: convert.paged_indices(
        ints([[1]]), ints([1]), 2, out=PagedIndices(ints([0, 0]), ints([0]).long(), ints([0]))
    ),
    r"paged\.indptr": lambda: convert.paged_lengths(
        PagedIndices(ints([0]), ints([0]), ints([0])), 2
    ),
    "columns": lambda: convert.block_table_from_pages(
        PagedIndices(ints([0, 1]), ints([0]), ints([0])), 0
    ),
    "positions": lambda: convert.slot_mapping(ints([[1]]), ints([0]), ints([0, 1]), 2),
    "slot_mapping": lambda: convert.kv_slots(ints([0, 1, 2])[::2]),
    "out": lambda: convert.kv_slots(ints([0]), out=ints([0])),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: wanted "):
        WRONG[name]()


def test_pairs_of_a_table_do_not_depend_on_its_strides() -> None:
    wide = torch.full((3, 9), HUGE, dtype=torch.int32)
    table = wide[:, 2:6]
    table.copy_(torch.arange(12).view(3, 4))
    lengths = ints([7, 0, 3])
    strided = convert.paged_indices(table, lengths, 2)
    contiguous = convert.paged_indices(table.clone(), lengths, 2)
    for a, b in zip(strided, contiguous, strict=True):
        assert torch.equal(a, b)
    assert [b - a for a, b in pairwise(strided.indptr.tolist())] == [4, 0, 2]
