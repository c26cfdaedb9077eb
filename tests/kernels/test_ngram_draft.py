"""`ngram_draft` against every length and every start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphattn.kernels import ops
from graphattn.kernels.ngram_draft import BLOCK
from graphattn.kernels.ngram_draft import ngram_draft as ngram_draft_triton
from graphattn.kernels.ngram_draft_ref import ngram_draft_ref

HUGE = 2**31 - 1
RUNNING, STOP_TOKEN, LENGTH, ERROR, NO_REQUEST = range(5)
ENDLESS = 10**6
TRITON_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # cpu: the interpreter


@dataclass(frozen=True)
class Slot:
    """One slot: its tokens, and how far it is."""

    tokens: Sequence[int]
    prefilled: int | None = None  # default: it decodes
    stop_len: int = ENDLESS
    finish: int = RUNNING


class Drafts(NamedTuple):
    """What a call left behind."""

    tokens: Tensor  # [B, K]
    count: Tensor  # [B]

    def lists(self) -> list[list[int]]:
        rows = zip(self.tokens.tolist(), self.count.tolist(), strict=True)
        return [row[:count] for row, count in rows]


@dataclass(frozen=True)
class Case:
    """One call. History past the tokens and places of drafts are poisoned."""

    slots: Sequence[Slot]
    max_seq_len: int
    max_drafts: int = 3
    min_match: int = 1
    max_match: int = 3

    def run(self, ngram_draft: Callable[..., None], device: str = "cpu") -> Drafts:
        def full(*shape: int) -> Tensor:
            return torch.full(shape, HUGE, dtype=torch.int32)

        B = len(self.slots)
        history, drafts, count = full(B, self.max_seq_len), full(B, self.max_drafts), full(B)
        for i, slot in enumerate(self.slots):
            history[i, : len(slot.tokens)] = torch.tensor(slot.tokens, dtype=torch.int32)
        state = (
            history,
            *(
                torch.tensor(values, dtype=torch.int32)
                for values in (
                    [len(slot.tokens) for slot in self.slots],
                    [
                        max(len(slot.tokens) - 1, 0) if slot.prefilled is None else slot.prefilled
                        for slot in self.slots
                    ],
                    [slot.stop_len for slot in self.slots],
                    [slot.finish for slot in self.slots],
                )
            ),
        )
        inputs = [tensor.to(device, copy=True) for tensor in state]
        drafts, count = drafts.to(device), count.to(device)
        ngram_draft(*inputs, drafts, count, self.min_match, self.max_match)
        for before, after in zip(state, inputs, strict=True):
            assert torch.equal(before, after.cpu()), "an input was written"
        return Drafts(drafts.cpu(), count.cpu())


def run_cpu(case: Case) -> Drafts:
    return case.run(ops.ngram_draft)


def run_triton(case: Case) -> Drafts:
    return case.run(ngram_draft_triton, TRITON_DEVICE)


def assert_same(actual: Drafts, expected: Drafts) -> None:
    """Also the places past the count, which are left as they were."""
    assert actual.lists() == expected.lists()
    assert torch.equal(actual.tokens, expected.tokens)


each_implementation = pytest.mark.parametrize("run", [run_cpu, run_triton], ids=["cpu", "triton"])
Run = Callable[[Case], Drafts]


@st.composite
def tokens(draw: st.DrawFn, max_size: int) -> list[int]:
    """Few token ids, or a pattern that repeats with a few faults: tails are often met."""
    vocab = draw(st.integers(1, 4))
    token = st.integers(0, vocab - 1)
    if draw(st.booleans()):
        return draw(st.lists(token, min_size=1, max_size=max_size))
    pattern = draw(st.lists(st.integers(0, 9), min_size=1, max_size=7))
    length = draw(st.integers(1, max_size))
    repeated = (pattern * length)[:length]
    for place in draw(st.lists(st.integers(0, length - 1), max_size=2)):
        repeated[place] = draw(token)
    return repeated


@st.composite
def cases(draw: st.DrawFn) -> Case:
    max_seq_len = draw(st.integers(1, 45))
    slots = []
    for _ in range(draw(st.integers(1, 7))):
        kind = draw(st.sampled_from(["free", "done", "prefill", "limit", "decode", "decode"]))
        seq = draw(tokens(max_seq_len))
        if kind == "free":
            slots.append(Slot((), prefilled=0, stop_len=0, finish=NO_REQUEST))
        elif kind == "done":
            slots.append(Slot(seq, finish=draw(st.integers(STOP_TOKEN, ERROR))))
        elif kind == "prefill":
            slots.append(Slot(seq, prefilled=draw(st.integers(0, len(seq) - 1))))
        elif kind == "limit":
            slots.append(Slot(seq, stop_len=len(seq) + draw(st.integers(1, 9))))
        else:
            slots.append(Slot(seq))
    min_match = draw(st.integers(1, 4))
    return Case(
        slots,
        max_seq_len,
        max_drafts=draw(st.integers(1, 8)),
        min_match=min_match,
        max_match=draw(st.integers(min_match, 6)),
    )


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_cpu_equals_the_loop(case: Case) -> None:
    assert_same(run_cpu(case), case.run(ngram_draft_ref))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_triton_equals_the_loop(case: Case) -> None:
    assert_same(run_triton(case), case.run(ngram_draft_ref))


@each_implementation
def test_the_longest_tail_wins_then_the_latest_start(run: Run) -> None:
    """Written out by hand: 7 8 9 beats the later 8 9, and of two 7 8 9 the later is followed."""
    slots = [
        Slot([7, 8, 9, 1, 2, 5, 8, 9, 3, 7, 8, 9]),
        Slot([7, 8, 9, 1, 7, 8, 9, 2, 4, 6, 7, 8, 9]),
        Slot([5, 8, 9, 3, 4, 1, 7, 8, 9]),
        Slot([9, 3, 4, 1, 7, 8, 9]),
        Slot([3, 4, 1, 7, 8, 9]),
    ]
    case = Case(slots, 30, max_drafts=2)
    assert run(case).lists() == [[1, 2], [2, 4], [3, 4], [3, 4], []]
    at_least_two = Case(slots, 30, max_drafts=2, min_match=2)
    assert run(at_least_two).lists() == [[1, 2], [2, 4], [3, 4], [], []]
    at_most_two = Case(slots, 30, max_drafts=2, max_match=2)
    assert run(at_most_two).lists() == [[3, 7], [2, 4], [3, 4], [3, 4], []]


@each_implementation
def test_an_occurrence_may_overlap_the_tail(run: Run) -> None:
    """The latest start is taken, so a run of one token is drafted on, and so is a pair."""
    slots = [Slot([6] * 9), Slot([6, 7] * 5), Slot([6, 6]), Slot([6]), Slot([6, 7, 6])]
    assert run(Case(slots, 30, max_drafts=5)).lists() == [
        [6] * 5,
        [6, 7, 6, 7, 6],
        [6] * 5,
        [],
        [7, 6, 7, 6, 7],
    ]


@each_implementation
def test_a_tail_longer_than_the_history_is_not_looked_for(run: Run) -> None:
    """Reading before the slot's history met the end of its neighbour's, here equal to the tail."""
    slots = [Slot([4] * 5), Slot([4, 4]), Slot([4, 4, 4, 4, 5]), Slot([4, 5, 4])]
    assert run(Case(slots, 5, min_match=1, max_match=6)).lists() == [[], [4, 4, 4], [], [5, 4]]
    assert run(Case(slots, 5, min_match=2, max_match=6)).lists() == [[], [], [], []]


@each_implementation
def test_drafts_leave_room_for_the_token_after_them(run: Run) -> None:
    """A step emits its accepted drafts and one more token, all within the limits."""
    pattern = [1, 2, 3, 4, 5]
    slots = [Slot(pattern * 2, stop_len=10 + more) for more in range(1, 8)]
    assert run(Case(slots, 40, max_drafts=4)).count.tolist() == [0, 1, 2, 3, 4, 4, 4]


@each_implementation
def test_drafts_have_places_in_the_history(run: Run) -> None:
    """The stop length keeps them there already; nothing is read or written if it does not."""
    for more, count in enumerate([0, 1, 2, 3, 4, 4]):
        case = Case([Slot([1, 2, 3, 4, 5] * 2)] * 2, 10 + more, max_drafts=4)
        assert run(case).count.tolist() == [count] * 2


@each_implementation
def test_only_decoding_slots_draft(run: Run) -> None:
    """Counts of all others are written, their draft places are not."""
    seq = [1, 2, 1, 2]
    slots = [
        Slot(seq),
        *(Slot(seq, finish=finish) for finish in (STOP_TOKEN, LENGTH, ERROR, NO_REQUEST)),
        *(Slot(seq, prefilled=prefilled) for prefilled in (0, 2, 4)),
        Slot((), prefilled=0, stop_len=0, finish=NO_REQUEST),
        Slot((), prefilled=0, finish=RUNNING),
    ]
    drafts = run(Case(slots, 9))
    assert drafts.count.tolist() == [3] + [0] * 9
    assert drafts.tokens[0].tolist() == [1, 2, 1]
    assert drafts.tokens[1:].unique().tolist() == [HUGE]


@each_implementation
@pytest.mark.parametrize("end", [3, 9, 10, 11, BLOCK + 9, BLOCK + 10, BLOCK + 11, 2 * BLOCK + 8])
def test_matches_in_and_across_blocks(run: Run, end: int) -> None:
    """Blocks are looked at from the latest on; a shorter match in a later one is given up."""
    length = 2 * BLOCK + 10
    seq = list(range(100, 100 + length))
    seq[-3:] = [7, 8, 9]
    seq[-5] = 9
    seq[end - 3 : end] = [7, 8, 9]
    assert run(Case([Slot(seq)], length + 5)).lists() == [(seq[end:] * 3)[:3]]


@each_implementation
def test_of_equal_matches_in_two_blocks_the_later_is_followed(run: Run) -> None:
    seq = list(range(100, 110 + 2 * BLOCK))
    seq[7] = seq[BLOCK + 7] = seq[-1] = 9
    assert run(Case([Slot(seq)], len(seq) + 5)).lists() == [seq[BLOCK + 8 : BLOCK + 11]]


@each_implementation
def test_the_first_token_may_match(run: Run) -> None:
    for length in (2, BLOCK, BLOCK + 1, BLOCK + 2):
        seq = [9, *range(100, 98 + length), 9]
        assert run(Case([Slot(seq)], length + 5)).lists() == [(seq[1:] * 3)[:3]]


def test_other_layouts_are_refused() -> None:
    vector = torch.zeros(2, dtype=torch.int32)
    drafts = torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match="history: wanted contiguous"):
        ngram_draft_triton(drafts.T, vector, vector, vector, vector, drafts, vector, 1, 3)


@pytest.mark.gpu
def test_op_on_cuda() -> None:
    generator = torch.Generator().manual_seed(5)
    slots = [
        Slot(torch.randint(0, 6, (500 + 7 * i,), generator=generator).tolist(), stop_len=990 + i)
        for i in range(70)
    ]
    case = Case(slots, 1_001, max_drafts=5, max_match=4)
    assert_same(case.run(ops.ngram_draft, "cuda"), case.run(ngram_draft_ref))
