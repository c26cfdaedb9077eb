"""`prepare` against a naive model: random steps, then the numbers of known faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from graphattn.kernels import ops
from graphattn.kernels.prepare import prepare as prepare_triton
from graphattn.kernels.prepare_ref import prepare_ref
from tests.kernels.prepare_case import (
    Config,
    Row,
    Run,
    Step,
    assert_same,
    chunk,
    decode,
    each_implementation,
    make_step,
    poisoned_outputs,
    run_cpu,
    run_triton,
    steps,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps())
def test_cpu_equals_the_naive_model(step: Step) -> None:
    assert_same(run_cpu(step), step.run(prepare_ref))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps())
def test_triton_equals_the_naive_model(step: Step) -> None:
    assert_same(run_triton(step), step.run(prepare_ref))


@each_implementation
def test_work_lists_are_longest_first(run: Run) -> None:
    """Written out by hand, since the oracle and the kernels have one author."""
    config = Config(batch=7, tokens=32, max_seq_len=64, prefill_block=4, align=1)
    rows = [
        decode(0, 3),
        decode(5, 40),  # 40 / 8 chunks are too many: 3 chunks of 16
        Row(None),
        chunk(1, 0, 9, 20),
        decode(2, 9),  # 2 chunks of 8
        chunk(3, 8, 6, 20),
        decode(4, 11),  # as long as row 4 by its first chunk
    ]
    step = run(make_step(config, rows))
    assert step.row_chunk.tolist() == [[8, 16, 8, 8, 8, 8, 8]]
    assert step.row_splits.tolist() == [[1, 3, 0, 0, 2, 0, 2]]
    items = [[1, 0], [1, 1], [1, 2], [4, 0], [4, 1], [6, 0], [6, 1], [0, 0]]
    assert step.decode_items[0, :8].tolist() == items
    assert step.decode_count.tolist() == [8]
    assert (step.decode_items[0, 8:] == -1).all()
    assert step.prefill_items[:5].tolist() == [[5, 1], [5, 0], [3, 2], [3, 1], [3, 0]]
    assert step.prefill_count.tolist() == [5]
    assert (step.prefill_items[5:] == -1).all()


@pytest.mark.parametrize("dcp_size", range(1, 9))
@pytest.mark.parametrize("interleave", [1, 2, 3, 16, 64])
def test_local_lengths_are_counts(dcp_size: int, interleave: int) -> None:
    """Lengths were off by one where L mod W = 0, and padding rows got length 1."""
    length = min(4 * dcp_size * interleave + 1, 700)
    position = torch.arange(length)
    for rank in range(dcp_size):
        config = Config(
            batch=2,
            tokens=length + 3,
            max_seq_len=length,
            dcp_size=dcp_size,
            dcp_rank=rank,
            interleave=interleave,
        )
        step = run_cpu(make_step(config, [Row(None), chunk(0, 0, length, length)]))
        held = position // interleave % dcp_size == rank
        assert step.visible_end[:length].tolist() == held.cumsum(0).tolist()
        assert ((step.kv_slot[:length] >= 0) == held).all()
        assert step.row_end.tolist() == [0, int(held.sum())]
        assert (step.visible_end[length:] == 0).all()


@each_implementation
@pytest.mark.parametrize(
    ("dcp_size", "interleave", "length", "longest"),
    [(2, 2, 2, 2), (8, 64, 64, 64), (2, 2, 6, 4), (2, 2, 18, 10)],
)
def test_longest_shard(run: Run, dcp_size: int, interleave: int, length: int, longest: int) -> None:
    """The bound ceil(L / W) is wrong for an interleave above 1: buffers were too small."""
    config = Config(batch=1, tokens=1, max_seq_len=length, dcp_size=dcp_size, interleave=interleave)
    assert run(make_step(config, [decode(0, length)])).row_end.tolist() == [longest]


@each_implementation
def test_the_mask_follows_the_interleave(run: Run) -> None:
    """A kernel assumed interleave 1 over a layout of 64 and hid keys from their query."""
    config = Config(batch=1, tokens=1, max_seq_len=256, dcp_size=4, interleave=64)
    ends = [
        run(make_step(replace(config, dcp_rank=rank), [decode(0, 2)])).visible_end.tolist()
        for rank in range(4)
    ]
    assert ends == [[2], [0], [0], [0]]


@each_implementation
def test_lengths_are_expanded_before_they_are_localized(run: Run) -> None:
    """Localizing the sequence and subtracting gave 3, 4, 5 and dropped recent keys."""
    config = Config(batch=1, tokens=3, max_seq_len=16, max_drafts=2, dcp_size=2, dcp_rank=1)
    step = run(make_step(config, [decode(0, 8, drafts=2, places=3)]))
    assert step.visible_end.tolist() == [4, 4, 5]


def test_pages_are_counted_per_shard() -> None:
    """513 tokens on 8 ranks: 2 pages of 64 on rank 0 and 1 on the others, not 9 everywhere."""
    pages = []
    for rank in range(8):
        config = Config(
            batch=1, tokens=513, max_seq_len=513, page_size=64, dcp_size=8, dcp_rank=rank
        )
        step = make_step(config, [chunk(0, 0, 513, 513)])
        step.inputs["page_table"] = torch.arange(config.pages, dtype=torch.int32)[None]
        pages.append(int(run_cpu(step).kv_slot.max()) // 64 + 1)
    assert pages == [2, 1, 1, 1, 1, 1, 1, 1]


@each_implementation
def test_page_table_width_is_divided_by_the_group(run: Run) -> None:
    """A million tokens on two ranks take 8,192 columns; flat slots exceed 32 bits."""
    length = 1_048_576
    config = Config(batch=1, tokens=2, max_seq_len=length, max_drafts=1, page_size=64, dcp_size=2)
    assert config.pages == 8_192
    for rank in range(2):
        step = make_step(
            replace(config, dcp_rank=rank), [decode(0, length - 1, drafts=1, places=2)]
        )
        step.inputs["page_table"][0, -1] = 2**30
        slots = run(step).kv_slot.tolist()
        assert slots == [2**36 + 63, -1] if rank == 0 else [-1, 2**36 + 63]


@each_implementation
def test_nothing_is_written_at_the_longest_length(run: Run) -> None:
    """Draft steps past the maximum length reached an out-of-bounds page."""
    config = Config(batch=2, tokens=8, max_seq_len=23, max_drafts=3)
    rows = [decode(0, 22, drafts=3, places=4), decode(1, 23, drafts=3, places=4)]
    step = run(make_step(config, rows))
    assert step.token_count.tolist() == [2, 1]
    assert step.positions.tolist() == [21, 22, 0, 0, 22, 0, 0, 0]
    assert (step.kv_slot >= 0).tolist() == [True, True, False, False, True, False, False, False]
    assert step.visible_end.tolist() == [22, 23, 0, 0, 23, 0, 0, 0]
    assert step.logits_count.tolist() == [2, 1]


@each_implementation
def test_every_row_has_its_own_number_of_drafts(run: Run) -> None:
    """Unequal numbers of drafts per request were refused or mis-sized."""
    config = Config(batch=4, tokens=16, max_seq_len=32, max_drafts=3)
    step = run(make_step(config, [decode(r, 10, drafts=r, places=4) for r in range(4)]))
    assert step.query_start.tolist() == [0, 4, 8, 12, 16]
    assert step.token_count.tolist() == [1, 2, 3, 4]
    assert step.logits_start.tolist() == [0, 4, 8, 12, 16]
    assert step.logits_count.tolist() == [1, 2, 3, 4]
    assert step.logits_token.tolist() == [0, 0, 0, 0, 4, 5, 0, 0, 8, 9, 10, 0, 12, 13, 14, 15]


def replay(run: Run, config: Config, steps_of_rows: Sequence[Sequence[Row]]) -> None:
    """Run steps into the same buffers; each equals the oracle on fresh ones."""
    outputs = poisoned_outputs(config)
    for seed, rows in enumerate(steps_of_rows):
        step = make_step(config, rows, seed)
        step.outputs = outputs
        after = run(step)
        assert_same(after, make_step(config, rows, seed).run(prepare_ref))
        outputs = after.outputs


@each_implementation
def test_shrinking_batch_leaves_no_tail(run: Run) -> None:
    """Padding rows kept positions of an earlier, larger batch."""
    config = Config(batch=8, tokens=8, max_seq_len=32, windows=(0, 6))
    eight = [decode(r, 9 + r) for r in range(8)]
    replay(run, config, [eight, eight[:5], [Row(None)] * 3 + eight[:2], []])


@each_implementation
def test_drafts_come_and_go(run: Run) -> None:
    """A step that accepted two, then a step without drafts, read stale state."""
    config = Config(batch=2, tokens=8, max_seq_len=32, max_drafts=3)
    with_drafts = [decode(r, 9, drafts=3, places=4) for r in range(2)]
    without = [decode(r, 13, drafts=0, places=4) for r in range(2)]
    mixed = [decode(0, 14, drafts=3, places=4), decode(1, 14, drafts=0, places=1)]
    replay(run, config, [with_drafts, without, mixed])


@each_implementation
def test_each_chunk_has_its_own_geometry(run: Run) -> None:
    """The second prefill chunk replayed the geometry of the first."""
    config = Config(batch=2, tokens=16, max_seq_len=32, windows=(0, 5), prefill_block=4)
    chunks = [[chunk(1, 0, 7, 20)], [chunk(1, 7, 3, 20)], [chunk(1, 10, 10, 20), decode(0, 5)]]
    replay(run, config, chunks)


@each_implementation
def test_a_prompt_of_one_token_is_prefill(run: Run) -> None:
    """It was taken for a decode row by its query length."""
    config = Config(batch=3, tokens=3, max_seq_len=16)
    step = run(make_step(config, [decode(0, 5), chunk(1, 0, 1, 1), decode(2, 7)]))
    assert step.prefill_items[:1].tolist() == [[1, 0]]
    assert step.row_splits.tolist() == [[1, 0, 1]]
    assert step.logits_count.tolist() == [1, 1, 1]
    assert step.logits_token.tolist() == [0, 1, 2]


@each_implementation
def test_a_done_slot_takes_the_list_of_its_query_length(run: Run) -> None:
    """Its places are written as zeros by one item or another, whatever ended it."""
    config = Config(batch=2, tokens=7, max_seq_len=16, max_drafts=2, prefill_block=4)
    rows = [replace(decode(slot, 9, places=3 + slot), finish=1) for slot in range(2)]
    step = run(make_step(config, rows))
    assert step.decode_items[0, :2].tolist() == [[0, 0], [-1, -1]]
    assert step.prefill_items[:2].tolist() == [[1, 0], [-1, -1]]
    assert step.row_of_token.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert step.visible_end.tolist() == [0] * 7
    assert step.kv_slot.tolist() == [-1] * 7


@each_implementation
def test_each_window_has_its_own_ranges(run: Run) -> None:
    """The window size was read from the group of layers, not from the layer."""
    config = Config(batch=1, tokens=3, max_seq_len=32, max_drafts=2, windows=(5, 0, 9), align=8)
    step = run(make_step(config, [decode(0, 21, drafts=2, places=3)]))
    assert step.visible_start.tolist() == [[16, 17, 18], [0, 0, 0], [12, 13, 14]]
    assert step.visible_end.tolist() == [21, 22, 23]
    assert step.row_begin.tolist() == [[16], [0], [8]]


@each_implementation
def test_a_full_batch_that_is_no_power_of_two(run: Run) -> None:
    """Rows beyond one vector, places beyond one block."""
    config = Config(batch=37, tokens=640, max_seq_len=600, windows=(0, 100), page_size=16)
    rows = [decode(slot, 2 + 13 * slot) for slot in range(36)] + [chunk(36, 3, 590, 597)]
    step = make_step(config, rows)
    assert_same(run(step), step.run(prepare_ref))


@each_implementation
def test_a_history_can_be_columns_of_a_wider_one(run: Run) -> None:
    """A module that predicts ahead reads token p + i at position p: rows begin i columns later."""
    config = Config(batch=2, tokens=4, max_seq_len=9, history_begins=2)
    step = make_step(config, [chunk(1, 3, 3, 9)])
    step.inputs["history"] = torch.arange(18, dtype=torch.int32).view(2, 9)
    step = run(step)
    assert step.input_ids.tolist() == [9 + 3, 9 + 4, 9 + 5, 0]
    assert step.positions.tolist() == [3, 4, 5, 0]


def test_a_history_of_scattered_rows_is_refused() -> None:
    step = make_step(Config(batch=2, tokens=4, max_seq_len=9), [decode(0, 5)])
    args = {**step.inputs, **step.outputs, "history": step.inputs["history"].T.contiguous().T}
    with pytest.raises(ValueError, match=r"history: wanted torch.int32 in contiguous rows"):
        prepare_triton(*args.values(), *step.config.integers)


def test_scattered_buffers_are_refused() -> None:
    """The kernels address visible ranges of group g at g * T, whatever the buffer's strides."""
    step = make_step(Config(batch=1, tokens=4, max_seq_len=8, windows=(0, 3)), [decode(0, 5)])
    args = {**step.inputs, **step.outputs, "visible_start": step.visible_start.T.contiguous().T}
    with pytest.raises(ValueError, match=r"visible_start: wanted contiguous torch.int32"):
        prepare_triton(*args.values(), *step.config.integers)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 37, 1000])
def test_op_on_cuda(batch: int) -> None:
    """The op dispatches to the kernels, and large batches fit one scan program."""
    config = Config(batch=batch, tokens=2 * batch + 5, max_seq_len=400, max_drafts=1)
    rows = [
        Row(None) if slot % 7 == 3 else decode(slot, 2 + slot % 398, drafts=slot % 2, places=2)
        for slot in range(batch)
    ]
    step = make_step(config, rows)
    assert_same(step.run(ops.prepare, "cuda"), step.run(prepare_ref))
