"""Steps for `prepare`: rows and slot states, poisoned outputs, random steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from graphattn import bounds
from graphattn.kernels import ops
from graphattn.kernels.prepare import prepare as prepare_triton

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
    history_begins: int = 0  # columns before the history that a place reads
    table_spare: int = 0  # columns beside the page table, of whatever holds it

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
        if begins := self.config.history_begins:
            inputs["history"] = pad(inputs["history"], (begins, 0), value=HUGE)[:, begins:]
        if spare := self.config.table_spare:
            table = pad(inputs["page_table"], (spare, spare), value=HUGE)
            inputs["page_table"] = table[:, spare:-spare]
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
        history_begins=draw(st.sampled_from([0, 1, 3])),
        table_spare=draw(st.sampled_from([0, 1, 2])),
    )
    return make_step(config, rows, seed=draw(st.integers(0, 2**16)))


def run_cpu(step: Step) -> Step:
    return step.run(ops.prepare)


def run_triton(step: Step) -> Step:
    return step.run(prepare_triton, TRITON_DEVICE)


each_implementation = pytest.mark.parametrize("run", [run_cpu, run_triton], ids=["cpu", "triton"])
Run = Callable[[Step], Step]


def decode(slot: int, seq_len: int, *, drafts: int = 0, places: int = 1) -> Row:
    return Row(slot, places, seq_len - 1, seq_len, 1, drafts)


def chunk(slot: int, context_len: int, places: int, prompt_len: int) -> Row:
    return Row(slot, places, context_len, prompt_len, prompt_len)
