"""What `sample` draws: kept tokens, the distribution, and that nothing else decides."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.kernels.sample_case import (
    Case,
    Request,
    Run,
    each_implementation,
    one_row_each,
    random_logits,
    run_cpu,
    run_triton,
)

# What top-k and top-p keep


def drawn(run: Run, logits: Sequence[float], request: Request, draws: int) -> set[int]:
    """Tokens drawn at as many positions."""
    requests = [replace(request, seq_len=position) for position in range(draws)]
    return set(run(one_row_each(torch.tensor([list(logits)] * draws), requests)).sampled)


LEVELS = [1.0, 1.0, 0.5, 0.5, 0.5, 0.0, -0.25, -math.inf]  # mass 2.718 2, 1.649 3, 1, 0.779


@pytest.mark.parametrize(
    ("request_", "kept"),
    [
        (Request(), {0, 1, 2, 3, 4, 5, 6}),
        (Request(top_k=1), {0, 1}),  # ties at the threshold stay
        (Request(top_k=2), {0, 1}),
        (Request(top_k=3), {0, 1, 2, 3, 4}),
        (Request(top_k=5), {0, 1, 2, 3, 4}),
        (Request(top_k=6), {0, 1, 2, 3, 4, 5}),
        (Request(top_k=8), {0, 1, 2, 3, 4, 5, 6}),
        (Request(top_k=99), {0, 1, 2, 3, 4, 5, 6}),
        (Request(top_p=0.0), {0, 1}),  # the most probable stay
        (Request(top_p=0.44), {0, 1}),  # both together have 0.4470 of the mass
        (Request(top_p=0.45), {0, 1, 2, 3, 4}),
        (Request(top_p=0.85), {0, 1, 2, 3, 4}),  # 0.8537
        (Request(top_p=0.86), {0, 1, 2, 3, 4, 5}),
        (Request(top_p=0.94), {0, 1, 2, 3, 4, 5, 6}),  # 0.9360 without 6
        (Request(top_k=3, top_p=0.52), {0, 1}),  # of what top-k keeps: 0.5236
        (Request(top_k=3, top_p=0.53), {0, 1, 2, 3, 4}),
        (Request(temperature=0.25, top_p=0.8), {0, 1}),  # temperature comes first: 0.8227
        (Request(temperature=0.25, top_p=0.83), {0, 1, 2, 3, 4}),
        (Request(presence=2.0, emitted=(0,), top_k=1), {1}),  # penalties come first
    ],
    ids=str,
)
def test_kept_tokens(request_: Request, kept: set[int]) -> None:
    """Every kept token is drawn, and no other: the rarest of them has probability 0.013."""
    assert drawn(run_cpu, LEVELS, request_, 1024) == kept


@pytest.mark.parametrize(
    ("request_", "kept"),
    [
        (Request(top_k=2), {0, 1}),
        (Request(top_p=0.45), {0, 1, 2, 3, 4}),
        (Request(top_k=3, top_p=0.52), {0, 1}),
        (Request(top_k=3, top_p=0.53), {0, 1, 2, 3, 4}),
    ],
    ids=str,
)
def test_kept_tokens_of_the_kernel(request_: Request, kept: set[int]) -> None:
    """Probabilities of 0.13 and more, and a seed that soon draws them all."""
    levels = [value for level in LEVELS for value in (level, -math.inf)]
    assert drawn(run_triton, levels, replace(request_, seed=(7, 0)), 8) == {
        2 * token for token in kept
    }


@each_implementation
def test_neighbours_in_value_are_told_apart(run: Run) -> None:
    """The threshold is one value, not a range: the next smaller fp32 goes."""
    below = float(np.nextafter(np.float32(1.0), np.float32(0.0)))
    levels = [0.5] * 50 + [1.25, 1.0, below, 1.0, below]
    assert drawn(run, levels, Request(top_k=3, seed=(7, 0)), 8) == {50, 51, 53}
    assert drawn(run, levels, Request(top_k=4, seed=(7, 0)), 4) & {52, 54}


# The distribution


def chi_square(counts: Counter[int], probabilities: Sequence[float]) -> float:
    total = sum(counts.values())
    return sum(
        (counts[token] - total * p) ** 2 / (total * p) for token, p in enumerate(probabilities)
    )


@pytest.mark.parametrize("temperature", [0.7, 1.6])
@pytest.mark.parametrize("over", ["positions", "seeds"])
def test_draws_follow_the_softmax(temperature: float, over: str) -> None:
    """2,048 draws of 11 tokens; chi-square with 10 degrees of freedom is above 35.6 once in 10,000
    times, and the draws are the same at every run of this test."""
    logits = random_logits((1, 11), 8, spread=1.0)
    draws = range(2048)
    if over == "positions":
        requests = [Request(temperature, seq_len=i) for i in draws]
    else:
        requests = [Request(temperature, seed=(i, 0)) for i in draws]
    got = run_cpu(one_row_each(logits.expand(len(draws), -1), requests))
    probabilities = (logits[0].double() / temperature).softmax(0).tolist()
    assert chi_square(Counter(got.sampled), probabilities) < 35.6


def test_kept_tokens_are_drawn_by_their_share() -> None:
    """Of what top-k and top-p leave; 2 degrees of freedom, above 18.4 once in 10,000 times."""
    logits = torch.tensor([1.5, 0.5, 1.0, 0.0, -1.0, -3.0])
    draws = range(2048)
    requests = [Request(top_k=4, top_p=0.85, seq_len=i) for i in draws]
    got = run_cpu(one_row_each(logits.expand(len(draws), -1), requests))
    assert chi_square(Counter(got.sampled), logits[:3].softmax(0).tolist()) < 18.4
    assert set(got.sampled) == {0, 1, 2}


def test_positions_are_independent() -> None:
    """Pairs of neighbouring positions: 15 degrees of freedom, above 44.3 once in 10,000 times."""
    requests = [Request(seq_len=i) for i in range(4096)]
    got = run_cpu(one_row_each(torch.zeros(len(requests), 4), requests)).sampled
    pairs = Counter(4 * a + b for a, b in zip(got[::2], got[1::2], strict=True))
    assert chi_square(pairs, [1 / 16] * 16) < 44.3


# A draw depends on nothing else


@each_implementation
def test_same_seed_and_position_give_the_same_token(run: Run) -> None:
    """At any place of any row of any batch, as a draft's place or as a row's first."""
    logits = random_logits((4, 131), 13)
    request = Request(top_k=40, seq_len=50, drafts=(7, 8, 9))
    together = run(Case(logits, [request], [0], [4], [4])).sampled
    assert len(set(together)) > 1

    others = [Request(seed=(i, i)) for i in range(3)]
    alone = [replace(request, seq_len=50 + i, drafts=()) for i in range(4)]
    for i in range(4):
        assert run(one_row_each(logits[i : i + 1], [alone[i]])).sampled == [together[i]]
    crowd = Case(
        torch.cat([random_logits((3, 131), 1), logits.flip(0)]),
        [*alone, *others],
        [4, -1, 5, 3, 2, 1, 0],
        [1, 0, 1, 1, 1, 1, 1],
        [1, 0, 2, 1, 1, 1, 1],
    )
    assert run(crowd).sampled[3:] == together[::-1]


@each_implementation
def test_neighbours_do_not_change_a_token(run: Run) -> None:
    """With drafts or without, greedy, sampled, penalised or broken: elsewhere rows without drafts
    advanced their neighbour's random state."""
    logits = random_logits((5, 99), 17)
    mine = Request(top_p=0.9, drafts=(1,))
    tokens = set()
    for neighbour in (
        Request(temperature=0.0, drafts=(3, 4)),
        Request(temperature=0.1, top_k=2, presence=1.0, emitted=(5, 6), drafts=(3, 4)),
        Request(top_p=0.1, drafts=()),
    ):
        count = 1 + len(neighbour.drafts)
        case = Case(logits, [neighbour, mine], [0, 1], [count, 2], [3, 2])
        tokens.add(tuple(run(case).sampled[3:]))
    logits[:3] = math.nan
    tokens.add(tuple(run(replace(case, logits=logits)).sampled[3:]))
    assert len(tokens) == 1


@each_implementation
def test_positions_and_seeds_give_different_noise(run: Run) -> None:
    """Random state frozen in a graph gave the same tokens at each replay."""
    flat = torch.zeros(1, 997)
    base = Request(seed=(5, 6), seq_len=70)
    requests = [
        base,
        replace(base, seq_len=71),
        replace(base, seed=(6, 6)),
        replace(base, seed=(5, 7)),
        replace(base, seed=(6, 5)),
    ]
    got = run(one_row_each(flat.repeat(len(requests), 1), requests)).sampled
    assert len(set(got)) == len(requests)
