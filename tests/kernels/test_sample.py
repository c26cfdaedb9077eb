"""`sample` against a loop over tokens with float64 sums and Python's integers for Philox."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import graphattn.kernels.sample as sample_triton
from graphattn.kernels import noise, ops, sample_cpu
from graphattn.kernels.greedy_ref import greedy_ref
from graphattn.kernels.sample_ref import (
    draw_ref,
    gumbel_ref,
    penalised_ref,
    philox_ref,
    sample_ref,
    scaled_ref,
    token_word_ref,
)
from tests.kernels.sample_case import Case, Request, Result, one_row_each

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TRITON_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # cpu: the interpreter
Run = Callable[[Case], Result]

# Noise in fp32 against float64. E = -log(1 - w) is at least w * (1 - 2**-25), so a few roundings
# are a relative error of 2**-21 at most, and as much of an absolute one of g = -log(E); |g| < 32,
# so each of up to four roundings of g, x + g and their parts adds half an ulp of 32.
GUMBEL_ERROR = 2.0**-21 + 2 * 2.0**-20
MARGIN = 2 * (GUMBEL_ERROR + 2 * 2.0**-20)


def run_cpu(case: Case) -> Result:
    return case.run(ops.sample)


def run_triton(case: Case) -> Result:
    return case.run(sample_triton.sample, TRITON_DEVICE)


each_implementation = pytest.mark.parametrize("run", [run_cpu, run_triton], ids=["cpu", "triton"])


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small vocabularies take several iterations too."""
    monkeypatch.setattr(sample_triton, "BLOCK", 64)


def random_logits(shape: tuple[int, int], seed: int, spread: float = 2.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread


# Noise


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
            (0xFFFFFFFF, 0xFFFFFFFF),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    """Of the Random123 distribution."""
    assert philox_ref(counter, key) == words


@triton.jit
def _words_kernel(out_ptr, first, position, seed_low, seed_high, BLOCK: tl.constexpr):
    words = noise.token_words(first, position, seed_low, seed_high, BLOCK)
    tl.store(out_ptr + tl.arange(0, BLOCK), words.to(tl.int32, bitcast=True))


@triton.jit
def _gumbel_kernel(word_ptr, out_ptr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    word = tl.load(word_ptr + lane).to(tl.uint32, bitcast=True)
    tl.store(out_ptr + lane, noise.gumbel(word))


def words_triton(first: int, count: int, position: int, seed: tuple[int, int]) -> list[int]:
    out = torch.zeros(count, dtype=torch.int32, device=TRITON_DEVICE)
    _words_kernel[(1,)](out, first, position, *seed, BLOCK=count)
    return [word % 2**32 for word in out.tolist()]


def words_cpu(first: int, count: int, position: int, seed: tuple[int, int]) -> list[int]:
    token = np.arange(first, first + count)
    return [int(w) for w in sample_cpu.token_words(token, first + count, position, list(seed))]


@pytest.mark.parametrize("words", [words_cpu, words_triton], ids=["cpu", "triton"])
@pytest.mark.parametrize("seed", [(0, 0), (-1, -1), (1, 0), (0, 1), (0x24A0938, -(2**31))], ids=str)
def test_words_are_those_of_philox(
    words: Callable[[int, int, int, tuple[int, int]], list[int]], seed: tuple[int, int]
) -> None:
    for first, position in ((0, 0), (64, 1), (200_000, 2**31 - 1)):
        expected = [token_word_ref(token, position, seed) for token in range(first, first + 64)]
        assert words(first, 64, position, seed) == expected


def test_words_of_few_tokens_are_those_of_all() -> None:
    """A few tokens take another path than a whole vocabulary."""
    vocab, few = 301, np.array([0, 5, 6, 7, 150, 299, 300])
    every = sample_cpu.token_words(np.arange(vocab), vocab, 12, [3, 4])
    assert sample_cpu.token_words(few, vocab, 12, [3, 4]).tolist() == every[few].tolist()


def edge_words() -> list[int]:
    """Both ends, where a power of two changes what fp32 can hold, and some in between."""
    near = [2**bit + d for bit in (1, 9, 22, 23, 24, 25, 26, 31) for d in (-1, 0, 1)]
    ends = [0, *near, 2**32 - 257, 2**32 - 129, 2**32 - 128, 2**32 - 2, 2**32 - 1]
    return ends + [random.Random(0).randrange(2**32) for _ in range(512 - len(ends))]


def gumbel_cpu(words: list[int]) -> list[float]:
    return [float(g) for g in sample_cpu.gumbel(np.array(words, np.uint32))]


def gumbel_triton(words: list[int]) -> list[float]:
    word = torch.tensor(words, dtype=torch.int64).to(torch.int32).to(TRITON_DEVICE)
    out = torch.zeros(len(words), device=TRITON_DEVICE)
    _gumbel_kernel[(1,)](word, out, BLOCK=len(words))
    return list(out.tolist())


@pytest.mark.parametrize("gumbel", [gumbel_cpu, gumbel_triton], ids=["cpu", "triton"])
def test_noise_is_within_its_rounding(gumbel: Callable[[list[int]], list[float]]) -> None:
    """At word 0 it is largest, 22.9; an error there would decide tokens."""
    words = edge_words()
    for word, g in zip(words, gumbel(words), strict=True):
        assert abs(g - gumbel_ref(word)) <= GUMBEL_ERROR, hex(word)


# Against the oracle


def random_request(rng: random.Random, vocab: int) -> Request:
    """Options as they come, each off in a good part of the requests."""

    def some(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab) for _ in range(rng.randint(0, most)))

    return Request(
        temperature=rng.choice([0.0, 0.6, 1.0, 1.7]),
        top_k=rng.choice([0, 0, 1, 4, 20, vocab - 1, vocab, 10_000]),
        top_p=rng.choice([1.0, 1.0, 0.95, 0.5, 0.0]),
        repetition=rng.choice([1.0, 1.0, 1.3, 0.8]),
        presence=rng.choice([0.0, 0.0, 0.7, -0.5]),
        frequency=rng.choice([0.0, 0.0, 0.4, -0.3]),
        seed=(rng.randrange(-(2**31), 2**31), rng.randrange(-(2**31), 2**31)),
        seq_len=rng.randrange(1, 10_000),
        drafts=some(3),
        prompt=some(30),
        emitted=some(9) * 2,
    )


def random_case(vocab: int, slots: int, seed: int, dtype: torch.dtype = torch.float32) -> Case:
    """Rows of decode with drafts, of prefill (no place used), of padding; places of no row."""
    rng = random.Random(seed)
    requests = [random_request(rng, vocab) for _ in range(slots)]
    slot_of_row = rng.sample(range(slots), slots)
    slot_of_row[slots // 2] = -1
    counts = [1 + len(requests[slot].drafts) for slot in slot_of_row]
    reserved = [count + rng.randint(0, 1) for count in counts]
    counts[1] = 0
    counts[slots // 2] = reserved[slots // 2] = 0
    places = sum(reserved) + 2
    wide = torch.full((places, vocab + 7), math.nan)
    wide[:, :vocab] = random_logits((places, vocab), seed)
    return Case(wide.to(dtype)[:, :vocab], requests, slot_of_row, counts, reserved)


def place_margins(case: Case) -> list[float]:
    """By how much the oracle's token beat the next one; infinite where nothing is drawn."""
    margins = [math.inf] * len(case.logits)
    arguments = case.arguments()
    occurrences = arguments[6].tolist()
    penalties = [torch.stack(arguments[10:13])[:, slot] for slot in range(len(case.requests))]
    for row, slot in enumerate(case.slot_of_row):
        for i in range(case.counts[row]):
            request = case.requests[slot]
            if request.temperature > 0:
                place = sum(case.reserved[:row]) + i
                x = penalised_ref(
                    case.logits[place].tolist(),
                    occurrences[slot],
                    list(request.drafts[:i]),
                    *penalties[slot],
                )
                x = scaled_ref(x, torch.tensor(request.temperature))
                position = request.seq_len + i
                top_p = float(arguments[9][slot])
                draw = draw_ref(x, request.top_k, top_p, position, request.seed)
                margins[place] = draw.margin
    return margins


def assert_equals_oracle(run: Run, case: Case) -> None:
    """Tokens exactly, but where noise decides by less than its rounding; those are rare."""
    expected, got = case.run(sample_ref), run(case)
    close = [
        place
        for place, (want, have) in enumerate(zip(expected.sampled, got.sampled, strict=True))
        if want != have
    ]
    margins = place_margins(case) if close else []
    # In half-ulps: the argument of each exp, up to 32; the exp; a sum in lanes of 64 (small
    # vocabularies) to 4,096, and over the lanes. Then a log and two differences.
    vocab = case.logits.shape[1]
    error = (32 + 4 + max(vocab // 4096, 5) + 12) * 2.0**-24
    assert all(margins[place] <= MARGIN for place in close), close
    assert len(close) <= 1
    for place, (want, have) in enumerate(zip(expected.logprob, got.logprob, strict=True)):
        if place not in close:
            assert have == pytest.approx(want, abs=error + 2.0**-22 * abs(want), nan_ok=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [61, 300])
@pytest.mark.parametrize("seed", [0, 1])
def test_cpu_equals_the_oracle(vocab: int, dtype: torch.dtype, seed: int) -> None:
    assert_equals_oracle(run_cpu, random_case(vocab, 12, seed, dtype))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("vocab", "dtype"), [(61, torch.float32), (300, torch.bfloat16), (128, torch.float16)], ids=str
)
def test_triton_equals_the_oracle(vocab: int, dtype: torch.dtype) -> None:
    assert_equals_oracle(run_triton, random_case(vocab, 7, vocab, dtype))


def test_triton_with_the_block_of_a_gpu() -> None:
    """A vocabulary of less than one block."""
    requests = [Request(top_k=3), Request(top_p=0.5), Request(temperature=0.0)]
    assert_equals_oracle(run_triton, one_row_each(random_logits((3, 45), 3), requests))


@each_implementation
@pytest.mark.usefixtures("small_blocks")
def test_greedy_is_the_largest_the_lowest_on_ties(run: Run) -> None:
    """Few values, so that the largest is tied within and across blocks."""
    logits = random_logits((6, 201), 5).round()
    expected = torch.zeros(6, dtype=torch.int32)
    greedy_ref(logits, expected)
    greedy = Request(temperature=0.0, top_k=3, top_p=0.2)  # both do nothing to the largest
    assert run(one_row_each(logits, [greedy] * 6)).sampled == expected.tolist()


# Penalties


@each_implementation
@pytest.mark.usefixtures("small_blocks")
def test_penalties_by_hand(run: Run) -> None:
    """Repetition counts the prompt, the other two count what was emitted."""
    logits = torch.full((1, 70), -9.0)
    logits[0, [3, 4, 5, 6]] = torch.tensor([4.0, 3.0, 2.75, 2.5])
    greedy = Request(temperature=0.0)
    requests = [
        greedy,  # 4, 3, 2.75, 2.5
        replace(greedy, repetition=2.0, prompt=(3,)),  # 2, 3
        replace(greedy, repetition=2.0, prompt=(3,), emitted=(4, 4)),  # 2, 1.5, 2.75
        replace(greedy, presence=1.5, frequency=9.0, prompt=(3,)),  # 4
        replace(greedy, presence=1.5, emitted=(3, 3, 3, 4)),  # 2.5, 1.5, 2.75
        replace(greedy, frequency=0.5, emitted=(3, 3, 3)),  # 2.5, 3
        replace(greedy, frequency=0.5, emitted=(3, 3)),  # 3, 3: the lower id
        replace(greedy, frequency=-0.5, presence=-0.5, emitted=(6, 6)),  # 4, ..., 4
        replace(greedy, frequency=-0.5, presence=-0.625, emitted=(6, 6)),  # 4, ..., 4.125
    ]
    case = one_row_each(logits.repeat(len(requests), 1), requests)
    assert run(case).sampled == [3, 4, 5, 3, 5, 4, 3, 3, 6]


@each_implementation
@pytest.mark.usefixtures("small_blocks")
def test_repetition_moves_both_signs_down(run: Run) -> None:
    logits = -torch.arange(1.0, 71.0).repeat(2, 1) / 64
    requests = [
        Request(temperature=0.0, repetition=3.5, prompt=(0,), emitted=(1, 1)),
        Request(temperature=0.0, repetition=0.5, prompt=(9,)),
    ]
    # -1/64 and -2/64 become -3.5/64 and -7/64; -10/64 becomes -5/64.
    assert run(one_row_each(logits, requests)).sampled == [2, 0]


@each_implementation
@pytest.mark.usefixtures("small_blocks")
def test_a_place_counts_the_drafts_before_it(run: Run) -> None:
    """Elsewhere only the last accepted token reached the penalties."""
    logits = torch.arange(70.0).flip(0).mul(-0.25).repeat(4, 1)  # 69 is largest, then 68, ...
    request = Request(temperature=0.0, frequency=0.375, drafts=(69, 69, 68))
    # Place 0 counts none; 1 has 69 at -0.375; 2 has 69 at -0.75; 3 has 68 at -0.625 too.
    case = Case(logits, [request], [0], [4], [4])
    assert run(case).sampled == [69, 68, 68, 67]
    # Emitted one by one, they give the same tokens.
    alone = [replace(request, drafts=(), emitted=request.drafts[:i]) for i in range(4)]
    assert run(one_row_each(logits, alone)).sampled == [69, 68, 68, 67]


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


@pytest.mark.usefixtures("small_blocks")
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
@pytest.mark.usefixtures("small_blocks")
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
@pytest.mark.usefixtures("small_blocks")
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
@pytest.mark.usefixtures("small_blocks")
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
@pytest.mark.usefixtures("small_blocks")
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


# Edges


@each_implementation
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_from_a_place_without_a_largest(run: Run, temperature: float) -> None:
    """Also with penalties, which must not turn -inf into NaN, nor NaN into anything else."""
    logits = torch.zeros(6, 150)
    logits[0, 149] = math.nan
    logits[1] = math.nan
    logits[2] = -math.inf
    logits[3] = -math.inf
    logits[3, 148] = -1e38
    logits[4, 77] = logits[4, 99] = math.inf
    logits[5, 3] = math.inf
    logits[5, 148] = math.nan
    request = Request(
        temperature, top_k=100, top_p=0.9, repetition=1.5, frequency=0.1, emitted=(3, 149)
    )
    got = run(one_row_each(logits, [request] * 6))
    assert got.sampled[:4] == [-1, -1, -1, 148]
    assert got.sampled[4] in (77, 99)
    assert got.sampled[5] == -1
    assert [math.isnan(value) for value in got.logprob] == [True, True, True, False, True, True]
    assert got.logprob[3] == 0.0


@each_implementation
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-6])
def test_a_tiny_temperature_is_greedy(run: Run, temperature: float) -> None:
    """Its reciprocal may overflow; the largest keeps distance 0."""
    logits = random_logits((3, 130), 21) - 50
    expected = logits.argmax(1).tolist()
    requests = [
        Request(temperature),
        Request(temperature, top_k=9, top_p=0.99),
        Request(temperature, top_p=0.5),
    ]
    assert run(one_row_each(logits, requests)).sampled == expected


@each_implementation
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.filterwarnings("ignore:overflow encountered")  # by the interpreter
def test_penalties_may_overflow(run: Run) -> None:
    """All of them at -inf are ties: an id in range comes out."""
    logits = torch.full((2, 70), -3e38)
    everything = tuple(range(70))
    request = Request(0.0, repetition=2.0, emitted=everything)
    got = run(one_row_each(logits, [request, replace(request, temperature=1.0)])).sampled
    assert got[0] == 0
    assert 0 <= got[1] < 70


@each_implementation
@pytest.mark.usefixtures("small_blocks")
def test_places_of_no_row_hold_zeros(run: Run) -> None:
    """Reserved and unused, of rows in prefill, past the last row; their logits may be NaN."""
    logits = random_logits((7, 30), 23)
    logits[[0, 2, 3, 5, 6]] = math.nan
    case = Case(logits, [Request()] * 4, [2, 0, -1, 3], [0, 1, 0, 1], [1, 3, 0, 2])
    got = run(case)
    assert [place for place in range(7) if got.sampled[place] == 0] == [0, 2, 3, 5, 6]
    assert [place for place in range(7) if got.logprob[place] == 0.0] == [0, 2, 3, 5, 6]


@each_implementation
def test_a_vocabulary_of_one_token(run: Run) -> None:
    requests = [Request(0.0), Request(top_k=1, top_p=0.5), Request()]
    got = run(one_row_each(torch.tensor([[3.0], [-2.0], [0.0]]), requests))
    assert got == Result([0, 0, 0], [0.0, 0.0, 0.0])


def test_other_layouts_are_refused() -> None:
    case = one_row_each(torch.zeros(3, 4), [Request()] * 3)
    scattered = replace(case, logits=torch.zeros(4, 3).T)
    with pytest.raises(ValueError, match="logits: wanted a contiguous last dimension"):
        scattered.run(sample_triton.sample)
    arguments = case.arguments()
    arguments[9] = arguments[9].double()
    with pytest.raises(ValueError, match=r"top_p: wanted contiguous torch\.float32"):
        sample_triton.sample(*arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [151_936, 50_257])
def test_op_on_cuda(dtype: torch.dtype, vocab: int) -> None:
    def on_cuda(case: Case) -> Result:
        return case.run(ops.sample, "cuda")

    assert_equals_oracle(on_cuda, random_case(vocab, 6, 0, dtype))
