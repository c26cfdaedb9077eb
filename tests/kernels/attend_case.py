"""Inputs of one paged attention call, built naively from rows, with everything unseen poisoned.

Every pool entry that no token of its row sees is NaN, every page-table entry without a visible
position holds an id far outside the pool, and all outputs start as NaN. Work lists follow the text
of `ops.prepare`, written down once more and slowly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from graphattn.bounds import ceil_div, local_length, local_position, owner
from graphattn.kernels.attend_ref import attend_ref
from graphattn.kernels.fp8_ref import dequantise_ref

NOWHERE = 10**6  # a page id: reading it is far outside any pool here


@dataclass(frozen=True)
class Row:
    """One row of a step. `context` tokens are cached, then come `places` query places."""

    context: int
    places: int = 1
    tokens: int | None = None  # places that hold a token; None = all
    prefill: bool = False
    seed: int = 0  # of the row's K, V and q, which do not depend on the batch
    padding: bool = False  # slot -1

    @property
    def existing(self) -> int:
        return 0 if self.padding else self.places if self.tokens is None else self.tokens


@dataclass(frozen=True)
class Setting:
    """Geometry and options of a call."""

    heads: int = 6
    kv_heads: int = 2
    dim: int = 16
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None  # float8_e4m3fn; None = `dtype`
    scales: str = ""  # of FP8 pools: by "head", one for the "tensor", or "" for none
    decode_query_len: int = 1
    max_splits: int = 4
    chunk: int = 32
    align: int = 16
    prefill_block: int = 5
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    tail: int = 0  # token places past the last row
    dcp_size: int = 1
    dcp_rank: int = 0
    interleave: int = 1
    device: str = "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.dim)


@dataclass
class Case:
    """Arguments of `attend` by name, in the order of its signature."""

    setting: Setting
    rows: Sequence[Row]
    args: dict[str, Any]

    @property
    def row_places(self) -> list[slice]:
        starts = self.args["query_start"].tolist()
        return [slice(a, b) for a, b in itertools.pairwise(starts)]

    def oracle(self) -> tuple[Tensor, Tensor]:
        a = self.args
        names = "q k_pool v_pool page_table slot_of_row query_start visible_start visible_end"
        return attend_ref(
            *(a[name] for name in names.split()),
            scale=a["scale"],
            softcap=a["softcap"],
            sinks=a["sinks"],
            k_scale=a["k_scale"],
            v_scale=a["v_scale"],
        )


def build(rows: Sequence[Row], setting: Setting, *, reverse_items: bool = False) -> Case:
    """A call for `rows`; slots and pages are handed out in an order unlike that of the rows."""
    s = setting
    batch = len(rows)
    places = [row.places for row in rows]
    starts = [sum(places[:i]) for i in range(batch + 1)]
    tokens = starts[-1] + s.tail
    slots = [
        (5 * i + 3) % batch if math.gcd(5, batch) == 1 else batch - 1 - i for i in range(batch)
    ]

    ranges = [_visible(row, s) for row in rows]
    longest = max([end for row in ranges for _, end in row], default=0)
    columns = ceil_div(longest, s.page_size) + 2
    pages = batch * columns
    order = torch.randperm(pages, generator=_generator(pages)).tolist()
    page_table = torch.full((batch, columns), NOWHERE, dtype=torch.int32)
    held = s.kv_dtype or s.dtype
    k_pool = torch.full((pages, s.kv_heads, s.page_size, s.dim), torch.nan).to(held)
    v_pool = k_pool.clone()
    k_scale, v_scale = (_scales(s, seed) for seed in (7, 8))
    q = torch.full((tokens, s.heads, s.dim), torch.nan, dtype=s.dtype)
    visible_start = torch.zeros(tokens, dtype=torch.int32)
    visible_end = torch.zeros(tokens, dtype=torch.int32)
    for i, row in enumerate(rows):
        length = row.context + row.existing
        k, v = (
            torch.randn(length, s.kv_heads, s.dim, generator=_generator(row.seed + n)).to(held)
            for n in (1, 2)
        )
        seen = [(a, b) for a, b in ranges[i] if b > a]
        low, high = min((a for a, _ in seen), default=0), max((b for _, b in seen), default=0)
        for p in range(length):
            c = local_position(p, s.dcp_size, s.interleave)
            if owner(p, s.dcp_size, s.interleave) == s.dcp_rank and low <= c < high:
                column, entry = divmod(c, s.page_size)
                page_table[slots[i], column] = page = order[i * columns + column]
                k_pool[page, :, entry], v_pool[page, :, entry] = k[p], v[p]
        here = slice(starts[i], starts[i] + row.existing)
        noise = torch.randn(row.places, s.heads, s.dim, generator=_generator(row.seed + 3))
        q[here] = noise[: row.existing].to(s.dtype)
        for j, (a, b) in enumerate(ranges[i]):
            visible_start[starts[i] + j], visible_end[starts[i] + j] = a, b

    work = _work_lists(rows, ranges, s, reverse_items)
    nan = {"fill_value": torch.nan, "dtype": torch.float32}
    partials = (batch, s.max_splits, s.decode_query_len, s.heads)
    args: dict[str, Any] = {
        "q": q,
        "k_pool": k_pool,
        "v_pool": v_pool,
        "page_table": page_table,
        "slot_of_row": _ints(
            [-1 if row.padding else x for row, x in zip(rows, slots, strict=True)]
        ),
        "query_start": _ints(starts),
        "visible_start": visible_start,
        "visible_end": visible_end,
        **work,
        "sinks": torch.randn(s.heads, generator=_generator(9)) if s.sinks else None,
        "partial_out": torch.full((*partials, s.dim), **nan),
        "partial_lse": torch.full(partials, **nan),
        "out": torch.full((tokens, s.heads, s.dim), torch.nan, dtype=s.dtype),
        "lse": torch.full((tokens, s.heads), **nan),
    }
    device = torch.device(s.device)
    args = {name: None if x is None else x.to(device) for name, x in args.items()}
    args |= {
        "scale": s.scale,
        "softcap": s.softcap,
        "decode_query_len": s.decode_query_len,
        "prefill_block": s.prefill_block,
        "k_scale": None if k_scale is None else k_scale.to(device),
        "v_scale": None if v_scale is None else v_scale.to(device),
    }
    return Case(s, rows, args)


@dataclass(frozen=True)
class Budget:
    """Largest allowed errors against the oracle: absolute, and relative for the stored output."""

    out: float
    out_relative: float
    lse: float

    @staticmethod
    def of(case: Case) -> Budget:
        a = case.args
        return Budget.for_entries(case.setting, a, keys=a["k_pool"], values=a["v_pool"])

    @staticmethod
    def for_entries(s: Setting, args: dict[str, Any], keys: Tensor, values: Tensor) -> Budget:
        """From the arithmetic of the kernels.

        fp32 has unit roundoff u; tensor cores truncate instead. A score is a dot of D products, so
        its error is at most (D + 16) u |q| |k| scale with the maps after it (soft-cap, base change,
        exp2). An error e of the scores moves lse by e and out by 2 e max|v|; a sum over N positions
        adds N u. The store rounds to the KV dtype: half an ulp on a GPU, where the weights of the
        second dot are rounded too, and one ulp in the interpreter, which truncates.
        """
        on_gpu = args["q"].is_cuda
        keys, values = (
            _held(x, args.get(name)) for x, name in ((keys, "k_scale"), (values, "v_scale"))
        )
        u = 2.0**-23 if on_gpu else 2.0**-24
        q, k, v = (x.double().nan_to_num(0.0) for x in (args["q"], keys, values))
        positions = int((args["visible_end"] - args["visible_start"]).max().clamp(min=1))
        score = s.scale * float(q.norm(dim=-1).max() * k.norm(dim=-1).max())
        lse = (s.dim + 16) * u * (score + s.softcap) + (positions + 16) * u
        out = 2 * lse * float(v.abs().max())
        ulp = 0.0 if s.dtype == torch.float32 else torch.finfo(s.dtype).eps
        if on_gpu:
            return Budget(out + ulp / 2 * float(v.abs().max()), ulp / 2, lse)
        return Budget(out, ulp, lse)


def check(case: Case, out: Tensor | None = None, lse: Tensor | None = None) -> None:
    """Compare with the oracle within the budget; places that see nothing must have exactly 0."""
    out = (case.args["out"] if out is None else out).double().cpu()
    lse = (case.args["lse"] if lse is None else lse).double().cpu()
    wanted_out, wanted_lse = case.oracle()
    budget = Budget.of(case)
    torch.testing.assert_close(out, wanted_out, atol=budget.out, rtol=budget.out_relative)
    torch.testing.assert_close(lse, wanted_lse, atol=budget.lse, rtol=0)
    empty = (case.args["visible_end"] <= case.args["visible_start"]).cpu()
    assert (out[empty] == 0).all()


def shards(setting: Setting) -> list[Setting]:
    """The same setting on every rank of its group."""
    return [replace(setting, dcp_rank=r) for r in range(setting.dcp_size)]


def _scales(s: Setting, seed: int) -> Tensor | None:
    """Some that differ, and are no powers of two."""
    if not s.scales:
        return None
    count = s.kv_heads if s.scales == "head" else 1
    return torch.rand(count, generator=_generator(seed)) + 0.3


def _held(pool: Tensor, scale: Tensor | None) -> Tensor:
    """The values of a pool, if it is of FP8."""
    if pool.dtype != torch.float8_e4m3fn:
        return pool
    return dequantise_ref(pool, torch.ones(1) if scale is None else scale[:, None, None])


def _visible(row: Row, s: Setting) -> list[tuple[int, int]]:
    """(visible_start, visible_end) of every place of the row."""
    ranges = []
    for p in range(row.context, row.context + row.existing):
        seen_from = max(0, p + 1 - s.window) if s.window else 0
        ranges.append(
            (
                local_length(seen_from, s.dcp_rank, s.dcp_size, s.interleave),
                local_length(p + 1, s.dcp_rank, s.dcp_size, s.interleave),
            )
        )
    return ranges + [(0, 0)] * (row.places - row.existing)


def _work_lists(
    rows: Sequence[Row], ranges: list[list[tuple[int, int]]], s: Setting, reverse: bool
) -> dict[str, Tensor]:
    begins, ends, chunks, splits, decode, prefill = [], [], [], [], [], []
    for i, row in enumerate(rows):
        real = ranges[i][: row.existing]
        begin = min((a for a, _ in real), default=0) // s.align * s.align
        end = max((b for _, b in real), default=0)
        span, chunk = max(0, end - begin), s.chunk
        while ceil_div(span, chunk) > s.max_splits:
            chunk *= 2
        count = max(1, ceil_div(span, chunk)) if row.places and not row.prefill else 0
        decode += [(i, split) for split in range(count)]
        if row.prefill:
            blocks = range(ceil_div(row.places, s.prefill_block))
            prefill += [(i, block) for block in reversed(blocks)]
        begins.append(begin)
        ends.append(end)
        chunks.append(chunk)
        splits.append(count)
    if reverse:
        decode.reverse()
        prefill.reverse()
    room = sum(row.places for row in rows) // s.prefill_block + len(rows)
    return {
        "row_begin": _ints(begins),
        "row_end": _ints(ends),
        "row_chunk": _ints(chunks),
        "row_splits": _ints(splits),
        "decode_items": _items(decode, len(rows) * s.max_splits),
        "decode_count": _ints([len(decode)]),
        "prefill_items": _items(prefill, room),
        "prefill_count": _ints([len(prefill)]),
    }


def _items(items: list[tuple[int, int]], room: int) -> Tensor:
    return _ints([*items, *[(-1, -1)] * (room - len(items))]).view(room, 2)


def _ints(values: Sequence[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
