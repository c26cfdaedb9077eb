"""`prepare` against a naive model: random steps, then the numbers of known faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphattn import bounds
from graphattn.kernels import ops
from graphattn.kernels.prepare import prepare as prepare_triton
from graphattn.kernels.prepare_ref import prepare_ref

Prepare = Callable[..., None]

HUGE = 2**31 - 1  # an id that no table or vocabulary holds
PAGE_LIMIT = 2**30  # page ids whose flat slots overflow int32
RUNNING = 0
TRITON_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # cpu: the interpreter


@dataclass(frozen=True)
class Row:
    """One row of a step and the state of its slot. `slot=None` is a padding row."""

    slot: int | None
    query_len: int = 0
    context_len: int = 0
    seq_len: int = 0
    prompt_len: int = 0
    drafts: int = 0
    finish: int = RUNNING


@dataclass(frozen=True)
class Config:
    """Integers of one prepare call and the bounds of its buffers."""

    batch: int
    tokens: int
    max_seq_len: int
    windows: Sequence[int] = (0,)
    max_drafts: int = 0
    page_size: int = 4
    dcp_size: int = 1
    dcp_rank: int = 0
    interleave: int = 1
    align: int = 4
    chunk: int = 8
    max_splits: int = 4
    prefill_block: int = 8

    @property
    def pages(self) -> int:
        longest = bounds.max_local_length(self.max_seq_len, self.dcp_size, self.interleave)
        return bounds.ceil_div(longest, self.page_size)

    @property
    def integers(self) -> tuple[object, ...]:
        return (
            list(self.windows),
            self.max_drafts,
            self.page_size,
            self.dcp_size,
            self.dcp_rank,
            self.interleave,
            self.align,
            self.chunk,
            self.max_splits,
            self.prefill_block,
        )


@dataclass
class Step:
    """Inputs of one call in the order of the schema, and fresh poisoned outputs."""

    config: Config
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.outputs = self.outputs or poisoned_outputs(self.config)

    def __getattr__(self, name: str) -> Tensor:
        return self.outputs[name]

    def run(self, prepare: Callable[..., None] = ops.prepare, device: str = "cpu") -> Step:
        """Run `prepare` on copies of everything."""
        inputs = {name: tensor.to(device, copy=True) for name, tensor in self.inputs.items()}
        outputs = {name: tensor.to(device, copy=True) for name, tensor in self.outputs.items()}
        prepare(*inputs.values(), *outputs.values(), *self.config.integers)
        for name, tensor in inputs.items():
            assert torch.equal(tensor.cpu(), self.inputs[name]), f"{name} was written"
        return Step(self.config, self.inputs, {n: t.cpu() for n, t in outputs.items()})


def poisoned_outputs(config: Config) -> dict[str, Tensor]:
    B, T, G, S = config.batch, config.tokens, len(config.windows), config.max_splits
    L = min(T, B * (1 + config.max_drafts))
    int32, int64 = torch.int32, torch.int64
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "input_ids": ((T,), int64),
        "positions": ((T,), int64),
        "row_of_token": ((T,), int32),
        "kv_slot": ((T,), int64),
        "visible_start": ((G, T), int32),
        "visible_end": ((T,), int32),
        "query_start": ((B + 1,), int32),
        "token_count": ((B,), int32),
        "logits_start": ((B + 1,), int32),
        "logits_count": ((B,), int32),
        "logits_token": ((L,), int64),
        "row_begin": ((G, B), int32),
        "row_end": ((B,), int32),
        "row_chunk": ((G, B), int32),
        "row_splits": ((G, B), int32),
        "decode_items": ((G, B * S, 2), int32),
        "decode_count": ((G,), int32),
        "prefill_items": ((T // config.prefill_block + B, 2), int32),
        "prefill_count": ((1,), int32),
    }
    return {name: torch.full(shape, HUGE, dtype=dtype) for name, (shape, dtype) in shapes.items()}


def make_step(config: Config, rows: Sequence[Row], seed: int = 0) -> Step:
    """A step of these rows. All that no token of theirs may read is poisoned."""
    B, K = config.batch, config.max_drafts
    generator = torch.Generator().manual_seed(seed)
    state = {
        name: torch.full((B,), HUGE, dtype=torch.int32)
        for name in ("context_len", "seq_len", "prompt_len", "finish")
    }
    history = torch.full((B, config.max_seq_len), HUGE, dtype=torch.int32)
    draft_tokens = torch.full((B, max(K, 1)), HUGE, dtype=torch.int32)
    draft_count = torch.full((B,), HUGE, dtype=torch.int32)
    page_table = torch.full((B, config.pages), HUGE, dtype=torch.int32)
    slot_of_row = torch.full((B,), -1, dtype=torch.int32)
    query_len = torch.zeros(B, dtype=torch.int32)
    for i, row in enumerate(rows):
        query_len[i] = row.query_len
        if row.slot is None:
            continue
        slot = slot_of_row[i] = row.slot
        for name, tensor in state.items():
            tensor[slot] = getattr(row, name)
        draft_count[slot] = row.drafts
        if row.finish == RUNNING:
            ids = torch.randint(50_000, (row.seq_len,), generator=generator, dtype=torch.int32)
            history[slot, : row.seq_len] = ids
            ids = torch.randint(50_000, (row.drafts,), generator=generator, dtype=torch.int32)
            draft_tokens[slot, : row.drafts] = ids
            length = min(row.seq_len + row.drafts, config.max_seq_len)
            local = bounds.max_local_length(length, config.dcp_size, config.interleave)
            pages = bounds.ceil_div(local, config.page_size)
            page_table[slot, :pages] = torch.randint(
                PAGE_LIMIT, (pages,), generator=generator, dtype=torch.int32
            )
    inputs = {
        "slot_of_row": slot_of_row,
        "query_len": query_len,
        "context_len": state["context_len"],
        "seq_len": state["seq_len"],
        "prompt_len": state["prompt_len"],
        "finish": state["finish"],
        "history": history,
        "draft_tokens": draft_tokens,
        "draft_count": draft_count,
        "page_table": page_table,
    }
    return Step(config, inputs)


def assert_same(actual: Step, expected: Step) -> None:
    for name, tensor in expected.outputs.items():
        torch.testing.assert_close(
            actual.outputs[name], tensor, rtol=0, atol=0, msg=lambda text, n=name: f"{n}: {text}"
        )


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Any step the host can launch: padding, done, decode and prefill rows in any order."""
    batch = draw(st.integers(1, 7))
    max_seq_len = draw(st.sampled_from([5, 23, 61]))
    K = draw(st.integers(0, 3))
    dcp_size = draw(st.integers(1, 4))
    slots = draw(st.permutations(range(batch)))
    rows = []
    for slot in slots:
        kind = draw(st.sampled_from(["padding", "done", "decode", "prefill", "idle"]))
        prompt = draw(st.integers(1, max_seq_len))
        places = draw(st.integers(1, 1 + K) if kind != "prefill" else st.integers(1, 20))
        if kind == "padding":
            rows.append(Row(None))
        elif kind == "prefill":
            context = draw(st.integers(0, prompt - 1))
            # The host knows the prompt exactly, so a chunk never passes its end.
            places = min(places, prompt - context)
            rows.append(Row(slot, places, context, prompt, prompt))
        else:
            seq = draw(st.integers(prompt, max_seq_len))
            context = seq - 1
            drafts = draw(st.integers(0, K)) if prompt < seq else 0
            finish = draw(st.integers(1, 4)) if kind == "done" else RUNNING
            # A done slot can still hold the places of a chunk that was planned before it ended.
            places = draw(st.integers(1, 20)) if kind == "done" else places
            places = 0 if kind == "idle" else places
            rows.append(Row(slot, places, context, seq, prompt, drafts, finish))
    rows = draw(st.permutations(rows))
    tokens = sum(row.query_len for row in rows) + draw(st.integers(0, 9))
    config = Config(
        batch=batch,
        tokens=max(tokens, 1),
        max_seq_len=max_seq_len,
        windows=draw(st.sampled_from([(0,), (7,), (0, 5), (16, 0, 1)])),
        max_drafts=K,
        page_size=draw(st.sampled_from([1, 4, 5])),
        dcp_size=dcp_size,
        dcp_rank=draw(st.integers(0, dcp_size - 1)),
        interleave=draw(st.sampled_from([1, 2, 3, 16])),
        align=draw(st.sampled_from([1, 4, 16])),
        chunk=draw(st.sampled_from([4, 8])),
        max_splits=draw(st.integers(1, 4)),
        prefill_block=draw(st.sampled_from([1, 4, 16])),
    )
    return make_step(config, rows, seed=draw(st.integers(0, 2**16)))


def run_cpu(step: Step) -> Step:
    return step.run(ops.prepare)


def run_triton(step: Step) -> Step:
    return step.run(prepare_triton, TRITON_DEVICE)


each_implementation = pytest.mark.parametrize("run", [run_cpu, run_triton], ids=["cpu", "triton"])
Run = Callable[[Step], Step]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps())
def test_cpu_equals_the_naive_model(step: Step) -> None:
    assert_same(run_cpu(step), step.run(prepare_ref))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps())
def test_triton_equals_the_naive_model(step: Step) -> None:
    assert_same(run_triton(step), step.run(prepare_ref))


def decode(slot: int, seq_len: int, *, drafts: int = 0, places: int = 1) -> Row:
    return Row(slot, places, seq_len - 1, seq_len, 1, drafts)


def chunk(slot: int, context_len: int, places: int, prompt_len: int) -> Row:
    return Row(slot, places, context_len, prompt_len, prompt_len)


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
