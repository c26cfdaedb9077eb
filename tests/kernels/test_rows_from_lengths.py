"""`rows_from_lengths` against its oracle, and what `prepare` makes of its rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphattn.kernels import ops
from graphattn.kernels.rows_from_lengths import rows_from_lengths as rows_triton
from graphattn.kernels.rows_from_lengths_ref import rows_from_lengths_ref

TRITON_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # cpu: the interpreter
POISON = 2**30 + 5
HUGE = [-(2**31), -1, 2**31 - 1]
MAX_SEQ_LEN = 40


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def run(
    call: Callable[..., None],
    inputs: list[Tensor | None],
    slots: int,
    limits: tuple[int, int, int],
    device: str = "cpu",
) -> list[list[int]]:
    """Rows and slot state after the call, poisoned before it."""
    tokens, longest, drafts = limits
    rows = len(inputs[0])  # type: ignore[arg-type]
    outputs = [
        torch.full((n,), POISON, dtype=torch.int32, device=device)
        for n in (rows, rows, slots, slots, slots, slots)
    ]
    moved = [None if x is None else x.to(device) for x in inputs]
    call(*moved, *outputs, tokens, longest, drafts, MAX_SEQ_LEN)
    return [output.tolist() for output in outputs]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Tensor | None], int, tuple[int, int, int]]:
    """Rows good and bad: no two share a slot, but slots, lengths and sums may be anything."""
    rows, slots, drafts = draw(st.integers(1, 9)), draw(st.integers(1, 12)), draw(st.integers(0, 3))
    tokens = draw(st.integers(1, 24))
    longest = draw(st.sampled_from([1 + drafts, tokens]))
    lengths = st.one_of(st.integers(0, 8), st.sampled_from(HUGE))
    contexts = st.one_of(st.integers(0, MAX_SEQ_LEN + 1), st.sampled_from(HUGE))
    seats = draw(st.permutations(range(max(rows, slots))))[:rows]
    outside = st.sampled_from([None, None, None, *HUGE])
    slot_of_row = [draw(outside) if draw(st.booleans()) else None for _ in range(rows)]
    chosen = [s if o is None else o for s, o in zip(seats, slot_of_row, strict=True)]
    inputs: list[Tensor | None] = [
        ints(*[draw(lengths) for _ in range(rows)]),
        ints(*[draw(contexts) for _ in range(rows)]),
        ints(*chosen),
        ints(*[draw(st.integers(0, 2)) for _ in range(rows)]) if draw(st.booleans()) else None,
    ]
    return inputs, slots, (tokens, longest, drafts)


@settings(max_examples=60, deadline=None)
@given(steps())
def test_cpu_equals_oracle(step: tuple[list[Tensor | None], int, tuple[int, int, int]]) -> None:
    assert run(ops.rows_from_lengths, *step) == run(rows_from_lengths_ref, *step)


@settings(max_examples=15, deadline=None)
@given(steps())
def test_triton_equals_oracle(step: tuple[list[Tensor | None], int, tuple[int, int, int]]) -> None:
    assert run(rows_triton, *step, device=TRITON_DEVICE) == run(rows_from_lengths_ref, *step)


def test_a_mixed_step() -> None:
    """A chunk, a decode row with one of two drafts, nobody, and a short chunk marked as such."""
    inputs = [ints(5, 2, 0, 1), ints(7, 9, 3, 0), ints(3, 0, 2, 1), ints(0, 0, 0, 1)]
    got = run(ops.rows_from_lengths, inputs, 5, (16, 16, 2))
    p = POISON
    assert got == [
        [3, 0, -1, 1],  # row_slot
        [5, 2, 0, 1],  # row_query_len
        [9, 0, p, 7, p],  # slot_context_len
        [10, 1, p, 12, p],  # slot_seq_len
        [0, 1, p, 12, p],  # slot_prompt_len
        [1, 0, p, 0, p],  # slot_draft_count
    ]


@pytest.mark.parametrize("name", ["query_len", "context_len", "slot_of_row", "prefill"])
def test_launcher_names_a_wrong_tensor(name: str) -> None:
    names = ["query_len", "context_len", "slot_of_row", "prefill"]
    inputs: list[Tensor | None] = [ints(1, 1).long() if n == name else ints(1, 1) for n in names]
    with pytest.raises(ValueError, match=rf"^{name}: wanted contiguous torch.int32"):
        run(rows_triton, inputs, 2, (4, 4, 0), device=TRITON_DEVICE)
