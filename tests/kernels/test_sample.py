"""`sample` against a loop over tokens with float64 sums and Python's integers for Philox."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

import graphattn.kernels.sample as sample_triton
from graphattn.kernels import ops
from graphattn.kernels.greedy_ref import greedy_ref
from graphattn.kernels.sample_ref import draw_ref, penalised_ref, sample_ref, scaled_ref
from tests.kernels.sample_case import (
    GUMBEL_ERROR,
    TRITON_DEVICE,
    Case,
    Request,
    Result,
    Run,
    each_implementation,
    one_row_each,
    random_logits,
    run_cpu,
    run_triton,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MARGIN = 2 * (GUMBEL_ERROR + 2 * 2.0**-20)  # of two tokens, each with x + g to round


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


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(61, torch.float32), (300, torch.bfloat16), (128, torch.float16)], ids=str
)
def test_triton_equals_the_oracle(vocab: int, dtype: torch.dtype) -> None:
    assert_equals_oracle(run_triton, random_case(vocab, 7, vocab, dtype))


def test_triton_with_the_block_of_a_gpu() -> None:
    """A vocabulary of less than one block."""
    requests = [Request(top_k=3), Request(top_p=0.5), Request(temperature=0.0)]
    case = one_row_each(random_logits((3, 45), 3), requests)
    assert_equals_oracle(lambda case: case.run(sample_triton.sample, TRITON_DEVICE), case)


@each_implementation
def test_greedy_is_the_largest_the_lowest_on_ties(run: Run) -> None:
    """Few values, so that the largest is tied within and across blocks."""
    logits = random_logits((6, 201), 5).round()
    expected = torch.zeros(6, dtype=torch.int32)
    greedy_ref(logits, expected)
    greedy = Request(temperature=0.0, top_k=3, top_p=0.2)  # both do nothing to the largest
    assert run(one_row_each(logits, [greedy] * 6)).sampled == expected.tolist()


# Penalties


@each_implementation
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
def test_repetition_moves_both_signs_down(run: Run) -> None:
    logits = -torch.arange(1.0, 71.0).repeat(2, 1) / 64
    requests = [
        Request(temperature=0.0, repetition=3.5, prompt=(0,), emitted=(1, 1)),
        Request(temperature=0.0, repetition=0.5, prompt=(9,)),
    ]
    # -1/64 and -2/64 become -3.5/64 and -7/64; -10/64 becomes -5/64.
    assert run(one_row_each(logits, requests)).sampled == [2, 0]


@each_implementation
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


# Edges


@each_implementation
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
