"""attend on the CPU against a float64 loop over visible entries."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from graphattn.bounds import local_length
from graphattn.kernels import attend_plan_cpu, ops

_POISON = 2**30  # a page id that no pool has
_NAN = math.nan


@dataclass(frozen=True)
class Case:
    """Rows (context_len, query places, existing tokens) on slots in reverse order."""

    rows: tuple[tuple[int, int, int], ...]
    num_q_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    dcp: tuple[int, int, int] = (0, 1, 1)  # rank, size, interleave
    padding: int = 3  # token places past query_start[B]


@dataclass(frozen=True)
class Metadata:
    page_table: Tensor
    slot_of_row: Tensor
    query_start: Tensor
    visible_start: Tensor
    visible_end: Tensor


def metadata(case: Case, pages: list[int]) -> Metadata:
    """Visible ranges from the definition; pages are handed out in the given order."""
    B = len(case.rows) + 1  # and a padding row at the end
    starts, low, high = [0], [], []
    for context, places, tokens in case.rows:
        starts.append(starts[-1] + places)
        for j in range(places):
            p = context + j
            first = max(0, p + 1 - case.window) if case.window else 0
            exists = j < tokens
            low.append(local_length(first, *case.dcp) if exists else 0)
            high.append(local_length(p + 1, *case.dcp) if exists else 0)
    starts.append(starts[-1])
    width = max([-(-h // case.page_size) for h in high], default=0) + 2
    table = torch.full((B, width), _POISON, dtype=torch.int32)
    slots = list(range(len(case.rows)))[::-1]
    for row, slot in enumerate(slots):
        for column in range(
            -(-max(high[starts[row] : starts[row + 1]], default=0) // case.page_size)
        ):
            table[slot, column] = pages.pop()
    pad = [0] * case.padding
    int32 = lambda x: torch.tensor(x, dtype=torch.int32)  # noqa: E731
    return Metadata(table, int32([*slots, -1]), int32(starts), int32(low + pad), int32(high + pad))


def run(case: Case, meta: Metadata, q, k_pool, v_pool, sinks) -> tuple[Tensor, Tensor]:
    out = torch.full_like(q, _NAN)
    lse = torch.full(q.shape[:2], _NAN)
    unused = torch.full((1,), -7, dtype=torch.int32)
    ops.attend(
        q, k_pool, v_pool, meta.page_table, meta.slot_of_row, meta.query_start,
        meta.visible_start, meta.visible_end, unused, unused, unused, unused, unused, unused,
        None, None, sinks, torch.empty(0), torch.empty(0), out, lse,
        case.head_dim**-0.5, case.softcap, 1, 16,
    )  # fmt: skip
    return out, lse


def naive(case: Case, meta: Metadata, q, k_pool, v_pool, sinks) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and the magnitude sum(p * |v|) in float64, entry by entry."""
    T, Hq, D = q.shape
    group = Hq // k_pool.shape[1]
    out = torch.zeros(T, Hq, D, dtype=torch.float64)
    magnitude = torch.zeros_like(out)
    lse = torch.full((T, Hq), -math.inf, dtype=torch.float64)
    for row, slot in enumerate(meta.slot_of_row.tolist()):
        for t in range(int(meta.query_start[row]), int(meta.query_start[row + 1])):
            if sinks is not None:
                lse[t] = sinks.double()
            seen = range(int(meta.visible_start[t]), int(meta.visible_end[t]))
            if not seen:
                continue
            page = [int(meta.page_table[slot, c // case.page_size]) for c in seen]
            offset = [c % case.page_size for c in seen]
            for h in range(Hq):
                k = k_pool[page, h // group, offset].double()
                v = v_pool[page, h // group, offset].double()
                s = k @ q[t, h].double() * case.head_dim**-0.5
                if case.softcap:
                    s = case.softcap * torch.tanh(s / case.softcap)
                terms = s if sinks is None else torch.cat([s, sinks[h : h + 1].double()])
                lse[t, h] = torch.logsumexp(terms, 0)
                p = torch.exp(s - lse[t, h])
                out[t, h], magnitude[t, h] = p @ v, p @ v.abs()
    return out, lse, magnitude


def tensors(case: Case, seed: int = 0):
    """q and two pools that hold NaN everywhere but in the entries that some token sees."""
    torch.manual_seed(seed)
    num_pages = 2 + sum(-(-(c + t) // case.page_size) for c, _, t in case.rows)
    meta = metadata(case, torch.randperm(num_pages).tolist())
    shape = (num_pages, case.num_kv_heads, case.page_size, case.head_dim)
    pools = [torch.full(shape, _NAN, dtype=case.dtype) for _ in range(2)]
    for row, slot in enumerate(meta.slot_of_row.tolist()):
        for t in range(int(meta.query_start[row]), int(meta.query_start[row + 1])):
            for c in range(int(meta.visible_start[t]), int(meta.visible_end[t])):
                page = int(meta.page_table[slot, c // case.page_size])
                for pool in pools:
                    entry = pool[page, :, c % case.page_size]
                    if entry.isnan().any():
                        entry.copy_(torch.randn(entry.shape))
    q = torch.randn(len(meta.visible_end), case.num_q_heads, case.head_dim).to(case.dtype)
    sinks = torch.randn(case.num_q_heads) if case.sinks else None
    return meta, q, *pools, sinks


def check(case: Case) -> None:
    meta, q, k_pool, v_pool, sinks = tensors(case)
    out, lse = run(case, meta, q, k_pool, v_pool, sinks)
    want, want_lse, magnitude = naive(case, meta, q, k_pool, v_pool, sinks)
    # fp32 dot products of D terms of size |q| |k|, then sums over the n visible entries; a score
    # that is off by e changes p by the factor exp(e). Random signs make errors grow like roots;
    # the factor 8 covers the worst of some 10**5 outcomes.
    eps = torch.finfo(torch.float32).eps
    longest = max(1, int((meta.visible_end - meta.visible_start).max()))
    score_error = (
        8 * eps * math.sqrt(case.head_dim) * (1 + want_lse.abs().nan_to_num(posinf=0).max())
    )
    budget = magnitude * (2 * score_error + 8 * eps * math.sqrt(longest))
    budget = budget + want.abs() * torch.finfo(case.dtype).eps / 2 + 1e-30
    assert not out.isnan().any()
    assert ((out.double() - want).abs() <= budget).all()
    empty = want_lse == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    assert (
        (lse.double() - want_lse)[~empty].abs() <= score_error + eps * want_lse[~empty].abs()
    ).all()
    assert (out[meta.visible_end <= meta.visible_start] == 0).all()


_LENGTHS = ((0, 1, 1), (14, 1, 1), (15, 1, 1), (16, 1, 1), (32, 1, 1), (69, 1, 1))
_MIXED = ((5, 4, 4), (40, 1, 1), (0, 37, 37), (17, 4, 2), (9, 4, 0), (30, 19, 19))


@pytest.mark.parametrize("rows", [_LENGTHS, _MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize(
    "case",
    [
        Case((), num_q_heads=9, num_kv_heads=3),
        Case((), num_q_heads=7, num_kv_heads=1, page_size=5),
        Case((), num_q_heads=4, num_kv_heads=4, head_dim=80),
        Case((), head_dim=96, dtype=torch.bfloat16),
        Case((), head_dim=128, dtype=torch.float16),
        Case((), head_dim=256, num_q_heads=2, num_kv_heads=1),
        Case((), window=7),
        Case((), window=16, sinks=True),
        Case((), softcap=0.5),
        Case((), sinks=True, softcap=3.0, dtype=torch.bfloat16),
        Case((), padding=0),
        Case((), dcp=(0, 2, 1)),
        Case((), dcp=(1, 2, 1), window=9, sinks=True),
        Case((), dcp=(3, 4, 16)),
        Case((), dcp=(7, 8, 3), page_size=2),
    ],
    ids=[
        "group3", "group7-page5", "d80", "d96-bf16", "d128-fp16", "d256", "window7",
        "window16-sinks", "softcap", "sinks-softcap-bf16", "no-padding",
        "dcp2-rank0", "dcp2-rank1-window-sinks", "dcp4-rank3-interleave16", "dcp8-rank7",
    ],
)  # fmt: skip
def test_against_float64(case: Case, rows: tuple[tuple[int, int, int], ...]) -> None:
    check(replace(case, rows=rows))


def test_chunks_of_a_long_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The online softmax over many chunks, with chunks that some queries do not see at all."""
    monkeypatch.setattr(attend_plan_cpu, "_MAX_ELEMENTS", 1)  # a chunk is a page
    attend_plan_cpu._plan.cache_clear()
    for window in (0, 20):
        check(Case(((0, 70, 70), (150, 1, 1), (33, 5, 4)), page_size=8, window=window))
    attend_plan_cpu._plan.cache_clear()


def test_equal_in_a_batch_of_any_spans() -> None:
    """Rows of very different length form groups of their own; none is padded to the longest."""
    case = Case(((700, 1, 1), (0, 1, 1), (690, 1, 1), (3, 1, 1)), page_size=64)
    check(case)
    meta = metadata(case, list(range(32)))
    items = attend_plan_cpu._items(
        meta.query_start.tolist(), meta.visible_start.numpy(), meta.visible_end.numpy()
    )
    groups = [[i.row for i in group] for group in attend_plan_cpu._grouped(items, max_places=1000)]
    assert groups == [[0, 2], [3, 1]]


def test_pools_of_any_strides() -> None:
    """Pools with heads innermost, and K and V side by side in one tensor."""
    case = Case(_MIXED, sinks=True)
    meta, q, k_pool, v_pool, sinks = tensors(case)
    want = run(case, meta, q, k_pool, v_pool, sinks)
    both = torch.stack([k_pool, v_pool], dim=1)
    got = run(case, meta, q, both[:, 0], both[:, 1], sinks)
    assert all(map(torch.equal, got, want))
    k_pool, v_pool = (p.transpose(1, 2).contiguous().transpose(1, 2) for p in (k_pool, v_pool))
    got = run(case, meta, q, k_pool, v_pool, sinks)
    assert all(map(torch.equal, got, want))


def test_contents_decide_not_addresses() -> None:
    """Static buffers keep their addresses while a replay changes what they hold."""
    case = Case(((20, 1, 1), (37, 1, 1)))
    meta, q, k_pool, v_pool, sinks = tensors(case)
    k_pool, v_pool = torch.randn(2, *k_pool.shape)
    run(case, meta, q, k_pool, v_pool, sinks)
    meta.visible_end[0] -= 9
    meta.page_table[[0, 1], :2] = meta.page_table[[1, 0], :2].clone()
    out, lse = run(case, meta, q, k_pool, v_pool, sinks)
    want, want_lse, _ = naive(case, meta, q, k_pool, v_pool, sinks)
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


def test_nothing_to_see() -> None:
    """Every row empty: the page table, all poison, is not read."""
    case = Case(((0, 4, 0), (0, 1, 0)))
    meta, q, k_pool, v_pool, _ = tensors(case)
    out, lse = run(case, meta, q, k_pool, v_pool, torch.ones(case.num_q_heads))
    assert (out == 0).all()
    assert (lse[:5] == 1).all()
    assert (lse[5:] == -math.inf).all()
