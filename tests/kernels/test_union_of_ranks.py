"""Both ways to combine ranks equal attention over all positions, however those are dealt out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.partials_case import NAN, Run, run_cpu, run_triton

DIM = 4


@dataclass(frozen=True)
class Problem:
    """Attention of `tokens` queries over `positions` keys that lie on `ranks` ranks."""

    ranks: int
    tokens: int
    heads: int
    positions: int
    by_head: bool
    has_sinks: bool
    dtype: torch.dtype
    seed: int


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    ranks, by_head = draw(st.integers(1, 8)), draw(st.booleans())
    return Problem(
        ranks=ranks,
        tokens=draw(st.integers(1, 3)),
        heads=ranks * draw(st.integers(1, 2)) if by_head else draw(st.sampled_from([1, 4, 9])),
        positions=draw(st.integers(0, 12)),
        by_head=by_head,
        has_sinks=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        seed=draw(st.integers(0, 2**16)),
    )


def attention(scores: Tensor, values: Tensor, seen: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax attention [T, H, D] over the positions `seen` [T, N] of each token, in float64.

    scores [T, H, N], values [N, H, D].
    """
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[None, :, None].expand(len(scores), -1, 1)], 2)
    weights = torch.softmax(scores, 2).nan_to_num(0.0)[:, :, : len(values)]
    return torch.einsum("thn,nhd->thd", weights, values)


def partial(
    scores: Tensor, values: Tensor, seen: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """One rank's out, NaN where it sees nothing, and its fp32 lse."""
    out = attention(scores, values, seen, None).to(dtype)
    lse = torch.logsumexp(scores.masked_fill(~seen[:, None], -torch.inf), 2).float()
    return out.masked_fill(~seen.any(1)[:, None, None], NAN), lse


def gather_and_reduce(
    run: Run, p: Problem, outs: Tensor, lses: Tensor, sinks: Tensor | None
) -> Tensor:
    """Sum of every rank's scaled term, [T, H, D]; the sum itself is exact."""
    slices = p.ranks if p.by_head else 1
    terms = torch.full((p.ranks, slices, p.tokens, p.heads // slices, DIM), NAN, dtype=p.dtype)
    for out, lse, scaled in zip(outs, lses, terms, strict=True):
        run("scale_partial", out, lse, lses, sinks, scaled)
    return terms.double().sum(0).transpose(0, 1).reshape(p.tokens, p.heads, DIM)


def exchange_and_merge(
    run: Run, p: Problem, outs: Tensor, lses: Tensor, sinks: Tensor | None
) -> Tensor:
    """Every rank's message to every rank, merged where it arrives, [T, H, D]."""
    rows = -(-p.tokens * p.heads // p.ranks)
    width = DIM + 4 // p.dtype.itemsize
    sent = torch.full((p.ranks, p.ranks, rows, width), NAN, dtype=p.dtype)
    for out, lse, message in zip(outs, lses, sent, strict=True):
        run("pack_partial", out, lse, message, p.by_head)
    merged = torch.full((p.ranks, rows, DIM), NAN, dtype=p.dtype)
    for rank, piece in enumerate(merged):
        received = sent[:, rank].contiguous()
        own, first = sinks, rank * rows
        if p.by_head:
            own, first = None if sinks is None else sinks.chunk(p.ranks)[rank].contiguous(), 0
        run("merge_packed", received, own, piece, first)
    if p.by_head:
        return merged.view(p.ranks, p.tokens, -1, DIM).transpose(0, 1).flatten(1, 2)
    assert (merged.flatten(0, 1)[p.tokens * p.heads :] == 0).all()
    return merged.flatten(0, 1)[: p.tokens * p.heads].view(p.tokens, p.heads, DIM)


def check(run: Run, p: Problem) -> None:
    """Within rounding: with M the largest magnitude of an LSE or a sink, weights err relatively by
    (4 M + W + 16) u in the ops and by 2 M u through LSEs rounded to fp32. Partials are rounded to
    the dtype by half an ulp, what is sent or merged by at most one. Weights sum to at most 1.
    """
    generator = torch.Generator().manual_seed(p.seed)
    scores = 4 * torch.randn(p.tokens, p.heads, p.positions, generator=generator).double()
    values = torch.randn(p.positions, p.heads, DIM, generator=generator).double()
    seen = torch.rand(p.tokens, p.positions, generator=generator) < 0.8
    seen[-1] &= p.seed % 3 > 0  # a token that sees nothing
    owner = torch.randint(0, p.ranks, (p.positions,), generator=generator)
    sinks = torch.randn(p.heads, generator=generator) if p.has_sinks else None

    parts = [partial(scores, values, seen & (owner == r), p.dtype) for r in range(p.ranks)]
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    wanted = attention(scores, values, seen, sinks)
    magnitudes = [0.0, *lses[lses.isfinite()].abs().tolist()]
    magnitude = max(magnitudes + ([] if sinks is None else sinks.abs().tolist()))
    error = (6 * magnitude + p.ranks + 16) * 2.0**-24 + 1.5 * torch.finfo(p.dtype).eps
    atol = error * max([0.0, *values.abs().flatten().tolist()])
    for way in (gather_and_reduce, exchange_and_merge):
        got = way(run, p, outs, lses, sinks).double()
        torch.testing.assert_close(got, wanted, atol=atol, rtol=0)
        assert (got[~seen.any(1)] == 0).all()


@given(problems())
@settings(max_examples=100, deadline=None)
def test_on_the_cpu(problem: Problem) -> None:
    check(run_cpu, problem)


@given(problems())
@settings(max_examples=12, deadline=None)
def test_in_triton(problem: Problem) -> None:
    check(run_triton, problem)
