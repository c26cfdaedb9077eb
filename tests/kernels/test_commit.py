"""`commit` against a loop over rows and tokens, and the tokens it must never lose or invent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphattn.kernels import ops
from graphattn.kernels.commit import commit as commit_triton
from graphattn.kernels.commit_ref import commit_ref

HUGE = 2**31 - 1
RUNNING, STOP_TOKEN, LENGTH, ERROR, NO_REQUEST = range(5)
ENDLESS = 10_000
MAX_SEQ_LEN = 40
TRITON_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # cpu: the interpreter
INPUTS = [
    "sampled",
    "slot_of_row",
    "token_count",
    "logits_start",
    "logits_count",
    "generation",
    "stop_len",
    "stop_tokens",
    "draft_tokens",
]
STATE = ("context_len", "seq_len", "finish", "history", "draft_count")
OUTPUTS = (
    "out_slot",
    "out_generation",
    "out_count",
    "out_finish",
    "out_context_len",
    "out_tokens",
)


@dataclass(frozen=True)
class Row:
    """One row, the state of its slot, and the samples at its logits places."""

    slot: int | None
    samples: Sequence[int] = ()
    drafts: Sequence[int] = ()
    seq_len: int = 5
    context_len: int | None = None  # default: seq_len - 1
    token_count: int = 1
    stop_len: int = ENDLESS
    stop_tokens: Sequence[int] = ()
    finish: int = RUNNING


@dataclass
class Case:
    """All tensors of one call by name."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Tensor:
        return self.tensors[name]

    def run(self, commit: Callable[..., None] = ops.commit, device: str = "cpu") -> Case:
        """Run `commit` on copies of everything."""
        tensors = {name: tensor.to(device, copy=True) for name, tensor in self.tensors.items()}
        commit(*(tensors[name] for name in (*INPUTS, *STATE, *OUTPUTS)))
        after = Case({name: tensor.cpu() for name, tensor in tensors.items()})
        for name in INPUTS:
            assert torch.equal(after.tensors[name], self.tensors[name]), f"{name} was written"
        return after

    def slot(self, slot: int) -> dict[str, object]:
        """The whole state of one slot."""
        return {name: self.tensors[name][slot].tolist() for name in STATE}


def make_case(rows: Sequence[Row], *, max_drafts: int = 0, stops: int = 3) -> Case:
    """State of `len(rows)` slots; every place without a sample is poisoned."""
    B, K = len(rows), max_drafts

    def full(*shape: int, value: int = HUGE) -> Tensor:
        return torch.full(shape, value, dtype=torch.int32)

    tensors = {
        "sampled": full(B * (1 + K)),
        "slot_of_row": full(B, value=-1),
        "token_count": full(B, value=0),
        "logits_start": torch.arange(B + 1, dtype=torch.int32) * (1 + K),
        "logits_count": full(B, value=0),
        "generation": torch.arange(100, 100 + B, dtype=torch.int32),
        "stop_len": full(B),
        "stop_tokens": full(B, stops, value=-1),
        "draft_tokens": full(B, max(K, 1)),
        "context_len": full(B),
        "seq_len": full(B),
        "finish": full(B, value=NO_REQUEST),
        "history": full(B, MAX_SEQ_LEN),
        "draft_count": full(B),
    }
    for name in OUTPUTS[:-1]:
        tensors[name] = full(B)
    tensors["out_tokens"] = full(B, 1 + K)
    for i, row in enumerate(rows):
        if row.slot is None:
            continue
        s = row.slot
        tensors["slot_of_row"][i] = s
        tensors["token_count"][i] = row.token_count
        tensors["logits_count"][i] = len(row.samples)
        for n, token in enumerate(row.samples):
            tensors["sampled"][i * (1 + K) + n] = token
        for n, token in enumerate(row.drafts):
            tensors["draft_tokens"][s, n] = token
        for n, token in enumerate(row.stop_tokens):
            tensors["stop_tokens"][s, n] = token
        tensors["draft_count"][s] = len(row.drafts)
        tensors["stop_len"][s] = min(row.stop_len, MAX_SEQ_LEN)
        tensors["seq_len"][s] = row.seq_len
        context = row.seq_len - 1 if row.context_len is None else row.context_len
        tensors["context_len"][s] = context
        tensors["finish"][s] = row.finish
    return Case(tensors)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Rows of all kinds. Four token ids, so that drafts and stop tokens are often met."""
    K = draw(st.integers(0, 8))
    batch = draw(st.integers(1, 6))
    token = st.integers(0, 3)
    rows = []
    for slot in draw(st.permutations(range(batch))):
        kind = draw(st.sampled_from(["padding", "done", "chunk", "decode", "decode", "decode"]))
        seq = draw(st.integers(1, MAX_SEQ_LEN - 1))
        if kind == "padding":
            rows.append(Row(None))
        elif kind == "done":
            rows.append(Row(slot, finish=draw(st.integers(1, 4)), token_count=0, seq_len=seq))
        elif kind == "chunk":
            context = draw(st.integers(0, seq - 1))
            count = draw(st.integers(0, seq - 1 - context))
            rows.append(Row(slot, (), (), seq, context, count))
        else:
            drafts = draw(st.lists(token, max_size=K))
            agreed = draw(st.integers(0, len(drafts)))
            rest = draw(st.lists(token, min_size=len(drafts) + 1, max_size=len(drafts) + 1))
            samples = drafts[:agreed] + rest[agreed:]
            if draw(st.integers(0, 4)) == 0:
                samples[draw(st.integers(0, len(drafts)))] = -1
            rows.append(
                Row(
                    slot,
                    samples,
                    drafts,
                    seq,
                    token_count=len(samples),
                    stop_len=seq + draw(st.integers(1, K + 3)),
                    stop_tokens=draw(st.lists(token, max_size=1)),
                )
            )
    return make_case(rows, max_drafts=K, stops=draw(st.sampled_from([1, 3, 8])))


def assert_same(actual: Case, expected: Case) -> None:
    for name in (*STATE, *OUTPUTS):
        torch.testing.assert_close(
            actual.tensors[name],
            expected.tensors[name],
            rtol=0,
            atol=0,
            msg=lambda text, n=name: f"{n}: {text}",
        )


def run_cpu(case: Case) -> Case:
    return case.run(ops.commit)


def run_triton(case: Case) -> Case:
    return case.run(commit_triton, TRITON_DEVICE)


each_implementation = pytest.mark.parametrize("run", [run_cpu, run_triton], ids=["cpu", "triton"])
Run = Callable[[Case], Case]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_cpu_equals_the_loop(case: Case) -> None:
    assert_same(run_cpu(case), case.run(commit_ref))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_triton_equals_the_loop(case: Case) -> None:
    assert_same(run_triton(case), case.run(commit_ref))


@each_implementation
def test_drafts_are_accepted_up_to_the_first_difference(run: Run) -> None:
    """Written out by hand: rejected at once, in the middle, and full acceptance with its bonus."""
    drafts = (7, 8, 9)
    samples = [(5, 8, 9, 4), (7, 8, 6, 4), (7, 8, 9, 4)]
    rows = [Row(slot, s, drafts, seq_len=10, token_count=4) for slot, s in enumerate(samples)]
    after = run(make_case(rows, max_drafts=3))
    assert after.out_tokens.tolist() == [[5, -1, -1, -1], [7, 8, 6, -1], [7, 8, 9, 4]]
    assert after.out_count.tolist() == [1, 3, 4]
    assert after.seq_len.tolist() == [11, 13, 14]
    assert after.context_len.tolist() == after.out_context_len.tolist() == [10, 12, 13]
    assert after.history[2, 9:15].tolist() == [HUGE, 7, 8, 9, 4, HUGE]
    assert after.draft_count.tolist() == [0, 0, 0]
    assert after.out_finish.tolist() == [RUNNING] * 3


@each_implementation
def test_a_request_ends_inside_its_accepted_drafts(run: Run) -> None:
    """By stop token, by length, by both at once (the stop token wins), by error."""
    drafts, samples = (7, 8, 9), (7, 8, 9, 4)
    rows = [
        Row(0, samples, drafts, stop_tokens=(1, 8)),
        Row(1, samples, drafts, stop_len=6),
        Row(2, samples, drafts, stop_len=7, stop_tokens=(8,)),
        Row(3, (7, 8, -1, 4), drafts),
        Row(4, (-1, 8, 9, 4), drafts, stop_len=6),
    ]
    after = run(make_case(rows, max_drafts=3))
    assert after.out_finish.tolist() == [STOP_TOKEN, LENGTH, STOP_TOKEN, ERROR, ERROR]
    assert after.finish.tolist() == after.out_finish.tolist()
    assert after.out_count.tolist() == [2, 1, 2, 2, 0]
    assert after.seq_len.tolist() == [7, 6, 7, 7, 5]
    assert after.context_len.tolist() == [6, 5, 6, 6, 4]


@each_implementation
def test_chunks_before_the_end_of_a_prompt_emit_nothing(run: Run) -> None:
    rows = [
        Row(0, seq_len=30, context_len=0, token_count=16),
        Row(1, (3,), seq_len=30, context_len=16, token_count=14),
    ]
    after = run(make_case(rows))
    assert after.context_len.tolist() == [16, 30]
    assert after.seq_len.tolist() == [30, 31]
    assert after.out_count.tolist() == [0, 1]


@each_implementation
def test_a_padding_row_leaves_slot_0_alone(run: Run) -> None:
    """A padding row was mapped to slot 0 and wrote slot 0's state."""
    rows = [Row(None), Row(1, (6,)), Row(2, finish=LENGTH, token_count=0)]
    case = make_case(rows)
    case.finish[0], case.context_len[0], case.seq_len[0] = RUNNING, 7, 8
    after = run(case)
    assert after.slot(0) == case.slot(0)
    assert after.slot(2) == case.slot(2)
    assert after.out_slot.tolist() == [-1, 1, 2]
    assert after.out_generation.tolist() == [-1, 101, 102]
    assert after.out_count.tolist() == [0, 1, 0]
    assert after.out_finish.tolist() == [NO_REQUEST, RUNNING, LENGTH]
    assert after.out_context_len.tolist() == [0, 5, 4]


@each_implementation
def test_nan_logits_end_their_request_alone(run: Run) -> None:
    """The argmax of NaN logits was out of range and corrupted its neighbours."""
    logits = torch.zeros(3, 50)
    logits[0, 9] = logits[2, 4] = 1.0
    logits[1, 3] = torch.nan
    sampled = torch.empty(3, dtype=torch.int32)
    ops.greedy(logits, sampled)
    case = make_case([Row(slot, (int(sampled[slot]),)) for slot in range(3)])
    after = run(case)
    assert after.out_tokens.tolist() == [[9], [-1], [4]]
    assert after.out_finish.tolist() == [RUNNING, ERROR, RUNNING]
    assert after.history[1].tolist() == case.history[1].tolist()


def next_token(token: int, position: int) -> int:
    """A model of three tokens whose next token depends on the last one and its position."""
    return (token * 2 + position * position + 1) % 3


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 8), st.data())
def test_tokens_do_not_depend_on_the_drafts(K: int, data: st.DataObject) -> None:
    """Steps with 0..K drafts in any order emit exactly what plain decoding emits."""
    end = 30
    case = make_case([Row(0, seq_len=3, context_len=2, stop_len=end)], max_drafts=K)
    case.history[0, :3] = torch.tensor([2, 0, 1])
    emitted: list[int] = []
    for _ in range(end):
        if int(case.finish[0]) != RUNNING:
            break
        seq = int(case.seq_len[0])
        drafts = data.draw(st.lists(st.integers(0, 2), max_size=K), label="drafts")
        inputs = [int(case.history[0, seq - 1]), *drafts]
        case.draft_count[0] = len(drafts)
        case.logits_count[0] = case.token_count[0] = len(inputs)
        case.draft_tokens[0].fill_(HUGE)
        case.draft_tokens[0, : len(drafts)] = torch.tensor(drafts, dtype=torch.int32)
        for i, token in enumerate(inputs):
            case.sampled[i] = next_token(token, seq - 1 + i)
        case = case.run(ops.commit)
        emitted += case.out_tokens[0, : int(case.out_count[0])].tolist()
    plain = [2, 0, 1]
    while len(plain) < end:
        plain.append(next_token(plain[-1], len(plain) - 1))
    assert emitted == plain[3:]
    assert case.history[0, :end].tolist() == plain
    assert int(case.finish[0]) == LENGTH


@pytest.mark.gpu
def test_op_on_cuda() -> None:
    rows = [
        Row(None) if slot % 5 == 2 else Row(slot, (7, 8, slot % 3), (7, 8), stop_tokens=(2,))
        for slot in range(300)
    ]
    case = make_case(rows, max_drafts=2)
    assert_same(case.run(ops.commit, "cuda"), case.run(commit_ref))
