"""`admit` against a loop over slots, and re-use of a slot."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphattn.kernels import ops
from graphattn.kernels.admit import admit as admit_triton
from graphattn.kernels.admit_ref import admit_ref

HUGE = 2**31 - 1
TRITON_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # cpu: the interpreter
INPUTS = [
    "admit_generation",
    "release",
    "admit_prompt_len",
    "admit_context_len",
    "admit_stop_len",
    "admit_stop_tokens",
    "page_updates",
]
STATE = [
    "generation",
    "finish",
    "context_len",
    "seq_len",
    "prompt_len",
    "stop_len",
    "stop_tokens",
    "draft_count",
    "page_table",
]
Tensors = dict[str, Tensor]


def make_inputs(slots: int, stops: int, updates: int) -> Tensors:
    """A step that changes nothing; every field that must not be read is poisoned."""
    inputs = {name: torch.full((slots,), HUGE, dtype=torch.int32) for name in INPUTS[:5]}
    inputs["admit_generation"].fill_(-1)
    inputs["release"].fill_(0)
    inputs["admit_stop_tokens"] = torch.full((slots, stops), HUGE, dtype=torch.int32)
    inputs["page_updates"] = torch.full((updates, 3), HUGE, dtype=torch.int32)
    inputs["page_updates"][:, 0] = -1
    return inputs


def admit_slot(inputs: Tensors, slot: int, generation: int, prompt: int, context: int = 0) -> None:
    inputs["admit_generation"][slot] = generation
    inputs["admit_prompt_len"][slot] = prompt
    inputs["admit_context_len"][slot] = context
    inputs["admit_stop_len"][slot] = prompt + 9
    inputs["admit_stop_tokens"][slot] = generation % 7


def make_state(slots: int, stops: int, pages: int) -> Tensors:
    """State of running requests, each value of its own."""
    state = {
        name: torch.arange(slots, dtype=torch.int32) + 1_000 * i
        for i, name in enumerate(STATE, start=1)
    }
    state["stop_tokens"] = torch.arange(slots * stops, dtype=torch.int32).view(slots, stops)
    state["page_table"] = torch.arange(slots * pages, dtype=torch.int32).view(slots, pages)
    return state


def run(
    admit: Callable[..., None], inputs: Tensors, state: Tensors, device: str = "cpu"
) -> Tensors:
    """State after `admit` on copies of everything."""
    inputs_copy = [inputs[name].to(device, copy=True) for name in INPUTS]
    after = {name: state[name].to(device, copy=True) for name in STATE}
    admit(*inputs_copy, *after.values())
    for name, tensor in zip(INPUTS, inputs_copy, strict=True):
        assert torch.equal(tensor.cpu(), inputs[name]), f"{name} was written"
    return {name: tensor.cpu() for name, tensor in after.items()}


def assert_same(actual: Tensors, expected: Tensors) -> None:
    for name in STATE:
        assert actual[name].tolist() == expected[name].tolist(), name


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensors, Tensors]:
    slots, stops, pages = draw(st.integers(1, 6)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    cells = st.tuples(st.integers(0, slots - 1), st.integers(0, pages - 1))
    updates = draw(st.lists(st.none() | cells, min_size=1, max_size=9))
    inputs = make_inputs(slots, stops, len(updates))
    for slot in range(slots):
        inputs["release"][slot] = draw(st.integers(0, 1))
        if draw(st.booleans()):
            prompt = draw(st.integers(1, 99))
            context = draw(st.integers(0, prompt - 1))
            admit_slot(inputs, slot, draw(st.integers(0, 2**30)), prompt, context)
    seen = set()
    for i, cell in enumerate(updates):
        if cell is not None and cell not in seen:
            seen.add(cell)
            inputs["page_updates"][i] = torch.tensor([*cell, draw(st.integers(0, 2**30))])
    return inputs, make_state(slots, stops, pages)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_cpu_equals_the_loop(case: tuple[Tensors, Tensors]) -> None:
    assert_same(run(ops.admit, *case), run(admit_ref, *case))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_triton_equals_the_loop(case: tuple[Tensors, Tensors]) -> None:
    assert_same(run(admit_triton, *case, TRITON_DEVICE), run(admit_ref, *case))


@pytest.mark.parametrize("slots", [1, 130, 300])
def test_triton_with_more_slots_or_updates_than_a_block(slots: int) -> None:
    inputs = make_inputs(slots, 2, 301 - slots)
    state = make_state(slots, 2, 400)
    for slot in range(0, slots, 3):
        admit_slot(inputs, slot, slot + 5, 20)
    inputs["release"][1::3] = 1
    for i in range(301 - slots):
        inputs["page_updates"][i] = torch.tensor([i % slots, i // slots, i])
    assert_same(run(admit_triton, inputs, state, TRITON_DEVICE), run(admit_ref, inputs, state))


def test_a_slot_is_used_again_with_other_pages() -> None:
    """Columns of the former request stay in the table and must not be read."""
    page_size, slots, pages = 4, 2, 5
    state = make_state(slots, 1, pages)
    state["finish"].fill_(0)
    inputs = make_inputs(slots, 1, 4)
    inputs["release"][1] = 1
    state = run(ops.admit, inputs, state)
    assert [int(state[n][1]) for n in ("generation", "finish", "seq_len")] == [-1, 4, 0]

    inputs = make_inputs(slots, 1, 4)
    admit_slot(inputs, 1, 8, prompt=6)
    inputs["page_updates"][2] = torch.tensor([1, 0, 71])
    inputs["page_updates"][0] = torch.tensor([1, 1, 70])
    state = run(ops.admit, inputs, state)
    assert state["page_table"][1].tolist() == [71, 70, 7, 8, 9]
    assert state["page_table"][0].tolist() == [0, 1, 2, 3, 4]

    kv_slot = prefill_kv_slots(state, slot=1, tokens=6, page_size=page_size)
    assert kv_slot == [284, 285, 286, 287, 280, 281]


def prefill_kv_slots(state: Tensors, slot: int, tokens: int, page_size: int) -> list[int]:
    """Flat KV slots that `prepare` gives one prefill row."""
    slots = len(state["finish"])

    def int32(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    def int64(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    slot_of_row = torch.tensor([slot] + [-1] * (slots - 1), dtype=torch.int32)
    query_len = torch.tensor([tokens] + [0] * (slots - 1), dtype=torch.int32)
    kv_slot = int64(tokens)
    ops.prepare(
        slot_of_row,
        query_len,
        *(state[name] for name in ("context_len", "seq_len", "prompt_len", "finish")),
        int32(slots, 20),  # history
        int32(slots, 1),  # draft_tokens
        state["draft_count"],
        state["page_table"],
        *(int64(tokens), int64(tokens), int32(tokens), kv_slot, int32(1, tokens), int32(tokens)),
        *(int32(slots + 1), int32(slots), int32(slots + 1), int32(slots), int64(slots)),
        *(int32(1, slots), int32(slots), int32(1, slots), int32(1, slots)),
        *(int32(1, slots, 2), int32(1), int32(tokens + slots, 2), int32(1)),
        *([0], 0, page_size, 1, 0, 1, 4, 8, 1, 1),
    )
    return list(kv_slot.tolist())


@pytest.mark.gpu
def test_op_on_cuda() -> None:
    inputs = make_inputs(64, 3, 500)
    for slot in range(0, 64, 2):
        admit_slot(inputs, slot, slot + 5, 20, context=slot % 19)
    inputs["release"][1::4] = 1
    for i in range(0, 500, 3):
        inputs["page_updates"][i] = torch.tensor([i % 64, i // 64, i])
    state = make_state(64, 3, 9)
    assert_same(run(ops.admit, inputs, state, "cuda"), run(admit_ref, inputs, state))
