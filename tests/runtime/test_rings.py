"""The rings between host and device, under copies that run late."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from graphattn.bounds import Bounds
from graphattn.inputs import (
    Admission,
    InputBlock,
    InputRing,
    PageUpdate,
    PromptRing,
    Sampling,
    StepInputs,
)
from graphattn.ring import OutputBlock, OutputRing, RowResult
from tests.runtime.lagging_stream import LaggingStream

CPU = torch.device("cpu")
BOUNDS = Bounds(max_batch=3, max_seq_len=24, max_tokens=8, page_size=4, num_pages=18, vocab_size=10)
SAMPLING = Sampling(0.5, 7, 0.9, 1.1, 0.25, -0.5, (3 << 32) + 9)


def numbered(n: int) -> StepInputs:
    return StepInputs(rows=[(n % 3, 1 + n % 5)], page_updates=[PageUpdate(n % 3, n % 6, n)])


def test_a_block_says_exactly_what_the_inputs_say() -> None:
    block, stream = InputBlock(BOUNDS, CPU), LaggingStream(pace=1)
    ring = InputRing(BOUNDS, CPU, steps_in_flight=1)
    admission = Admission(2, 7, [5, 6, 7], 2, 1, 9, [3, 4], SAMPLING)
    ring.send(StepInputs([(2, 3), (0, 1)], [admission], [1], [PageUpdate(2, 0, 11)]), block, stream)
    while stream.pending:
        stream.run_one()
    assert block.slot_of_row.tolist() == [2, 0, -1]
    assert block.query_len.tolist() == [3, 1, 0]
    assert block.admit_generation.tolist() == [-1, -1, 7]
    assert block.release.tolist() == [0, 1, 0]
    assert block.admit_prompt_len[2] == 3
    assert block.admit_given_len[2] == 2
    assert block.admit_context_len[2] == 1
    assert block.admit_stop_len[2] == 9
    assert block.admit_stop_tokens[2].tolist() == [3, 4, -1, -1, -1, -1, -1, -1]
    assert block.page_updates[0].tolist() == [2, 0, 11]
    assert block.temperature[2] == 0.5
    assert block.top_k[2] == 7
    assert block.frequency_penalty[2] == -0.5
    assert block.seed[2].tolist() == [9, 3]
    assert (block.page_updates[1:, 0] == -1).all()


def test_a_fresh_block_describes_an_idle_step() -> None:
    block = InputBlock(BOUNDS, CPU)
    assert (block.slot_of_row == -1).all()
    assert (block.query_len == 0).all()
    assert (block.admit_generation == -1).all()
    assert (block.release == 0).all()
    assert (block.page_updates[:, 0] == -1).all()


@given(st.integers(1, 4), st.integers(1, 3))
def test_staging_is_never_overwritten_before_its_copy_ran(depth: int, pace: int) -> None:
    """Elsewhere a recycled pinned buffer gave a step the inputs of a later one."""
    block, stream = InputBlock(BOUNDS, CPU), LaggingStream(pace)
    ring = InputRing(BOUNDS, CPU, steps_in_flight=depth)
    seen: list[tuple[int, int]] = []
    for n in range(12):
        ring.send(numbered(n), block, stream)
        stream.submit(lambda: seen.append((int(block.query_len[0]), int(block.page_updates[0, 2]))))
    while stream.pending:
        stream.run_one()
    assert seen == [(1 + n % 5, n) for n in range(12)]


def test_a_filled_entry_leaves_nothing_of_an_earlier_step() -> None:
    block, stream = InputBlock(BOUNDS, CPU), LaggingStream(pace=9)
    ring = InputRing(BOUNDS, CPU, steps_in_flight=1)
    full = StepInputs(
        [(0, 2), (1, 2), (2, 2)],
        [Admission(i, i, [1], 1, 0, 5, [9], SAMPLING) for i in range(3)],
        [0, 1, 2],
        [PageUpdate(i, i, i) for i in range(3)],
    )
    for inputs in (full, full, StepInputs(), StepInputs()):
        ring.send(inputs, block, stream)
    while stream.pending:
        stream.run_one()
    assert torch.equal(block.slot_of_row, torch.full((3,), -1, dtype=torch.int32))
    assert (block.query_len == 0).all()
    assert (block.admit_generation == -1).all()
    assert (block.release == 0).all()
    assert (block.page_updates[:, 0] == -1).all()


@given(st.lists(st.integers(1, 24), min_size=1, max_size=12), st.integers(1, 4))
def test_prompts_arrive_whole_whatever_the_lag(lengths: list[int], pace: int) -> None:
    stream = LaggingStream(pace)
    ring = PromptRing(BOUNDS, CPU, prompts_in_flight=2)
    targets = [torch.zeros(24, dtype=torch.int32) for _ in lengths]
    for n, (length, target) in enumerate(zip(lengths, targets, strict=True)):
        ring.send([n * 100 + i for i in range(length)], target, stream)
    while stream.pending:
        stream.run_one()
    for n, (length, target) in enumerate(zip(lengths, targets, strict=True)):
        assert target[:length].tolist() == [n * 100 + i for i in range(length)]
        assert (target[length:] == 0).all()


def test_the_prompt_ring_says_when_it_is_full() -> None:
    stream = LaggingStream(pace=0)
    ring = PromptRing(BOUNDS, CPU, prompts_in_flight=2)
    assert ring.has_room([5, 5])
    assert not ring.has_room([5, 5, 5]), "more prompts than entries"
    ring.send([1], torch.zeros(24, dtype=torch.int32), stream)
    assert ring.has_room([5])
    assert not ring.has_room([5, 5]), "one entry's copy has not run"


def test_results_are_read_in_order_and_only_when_landed() -> None:
    block, stream = OutputBlock(BOUNDS, CPU), LaggingStream(pace=0)
    ring = OutputRing(BOUNDS, CPU, steps_in_flight=2)
    block.slot.fill_(-1)
    for n in range(2):
        stream.submit(
            lambda n=n: (
                block.slot.copy_(torch.tensor([1, -1, 2])),
                block.generation.fill_(n),
                block.count.copy_(torch.tensor([1, 0, 0])),
                block.tokens.fill_(40 + n),
                block.logprobs.fill_(-0.5),
                block.logits_count.fill_(2),
                block.context_len.fill_(6),
                block.finish.fill_(0),
            )
        )
        ring.receive(n, block, stream)
    assert not ring.has_room
    assert ring.in_flight == 2
    assert ring.landed() == []
    while stream.pending:
        stream.run_one()
    results = ring.landed()
    assert [r.number for r in results] == [0, 1]
    q = BOUNDS.decode_query_len
    assert results[0].rows == (
        RowResult(1, 0, 1, 0, 6, 2, [40] * q, [-0.5] * q),
        RowResult(-1, 0, 0, 0, 6, 2, [40] * q, [-0.5] * q),
        RowResult(2, 0, 0, 0, 6, 2, [40] * q, [-0.5] * q),
    )
    assert results[1].rows[0].tokens == [41] * q
    assert ring.has_room
    assert ring.in_flight == 0
