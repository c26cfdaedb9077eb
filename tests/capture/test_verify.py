"""`verify` passes right replays and names what is wrong with seeded faults."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graphattn._capture.host import HostGraph
from graphattn._capture.verify import verify


class Step:
    """Sums live rows into a state and shows how many there were."""

    def __init__(self) -> None:
        self.source = torch.zeros(6, 2)
        self.live = torch.zeros(1, dtype=torch.int64)
        self.scratch = torch.zeros(6, 2)
        self.total = torch.zeros(2)
        self.out = torch.full((6, 2), float("nan"))

    def inputs(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        self.source.copy_(torch.randn(6, 2, generator=generator))
        self.live.fill_([6, 3, 1, 5][step % 4])

    def run(self) -> None:
        live = (torch.arange(6) < self.live)[:, None]
        self.scratch.copy_(torch.where(live, self.source, 0.0))
        self.total.add_(self.scratch.sum(0))
        self.out.copy_(torch.where(live, self.source * 2, float("nan")))

    def poison(self) -> None:
        self.scratch.fill_(float("nan"))
        self.out.fill_(1e30)

    def check(self, replay: Any, eager: Callable[[], None] | None = None, **options: Any) -> Any:
        defaults = {"inputs": self.inputs, "watch": vars(self), "steps": 8, "poison": self.poison}
        return verify(eager or self.run, replay, **(defaults | options))


def test_a_right_replay_passes_with_nan_in_its_outputs() -> None:
    step = Step()
    graph = HostGraph("step")
    graph.capture(step.run)
    report = step.check(graph)
    assert report.ok
    assert report.steps == 8
    assert str(report) == "verify: replay equals eager bit for bit in 8 steps"
    expected = Step()
    for i in range(8):
        expected.inputs(i)
        expected.run()
    assert torch.equal(step.total, expected.total)  # the state went on


def test_a_stale_tail_is_found() -> None:
    """The replay writes live rows only, and relies on a tail that nobody clears."""
    step = Step()

    def replay() -> None:
        live = int(step.live)
        step.scratch[:live] = step.source[:live]
        step.total.add_(step.scratch[:live].sum(0))
        step.out[:live] = step.source[:live] * 2
        step.out[live:] = float("nan")

    report = step.check(replay)
    assert not report.ok
    difference = report.difference
    assert (difference.step, difference.name, difference.index) == (1, "scratch", (3, 0))
    assert difference.eager == 0.0
    assert difference.other != difference.other  # the poison
    assert difference.num_elements == 6
    assert "step 1: scratch[3, 0] is 0.0 eagerly and nan otherwise (6 elements" in str(report)


def test_a_frozen_host_value_is_found() -> None:
    step = Step()
    count = [0]

    def run() -> None:
        step.total.add_(count[0])

    graph = HostGraph("frozen")
    graph.capture(run)

    def inputs(i: int) -> None:
        count[0] = i

    report = step.check(graph, run, inputs=inputs, poison=None)
    assert (report.difference.step, report.difference.name) == (1, "total")
    assert (report.difference.eager, report.difference.other) == (1.0, 0.0)
    assert report.steps == 2


def test_a_re_created_tensor_is_found() -> None:
    """The program makes its output anew each step; the graph goes on writing the first one."""
    step = Step()

    def run() -> None:
        step.out = step.source * 2

    graph = HostGraph("re-created")
    graph.capture(run)
    report = step.check(graph, run, poison=None)
    assert not report.ok
    assert report.moved == ("out",)
    assert "out moved to another address" in str(report)


def test_eager_that_differs_from_itself_is_named_and_not_held_against_the_replay() -> None:
    step = Step()
    calls: list[Tensor] = []

    def run() -> None:
        calls.append(step.total)
        step.out.fill_(len(calls))
        step.total.add_(1)

    report = step.check(run, run, poison=None)
    assert report.difference is None
    assert [(d.name, d.step) for d in report.unstable] == [("out", 0)]
    assert not report.ok
    assert "eager is not deterministic at step 0: out[0, 0] is 1.0" in str(report)


def test_eager_runs_again_at_first_and_where_a_replay_differs() -> None:
    """A thousand steps cost little more than two runs each; what is not deterministic only now and
    then is still not held against the replay, and the state goes on from the replay's result."""
    out, runs = torch.zeros(1), {"eager": 0, "replay": 0}

    def run(kind: str) -> None:
        runs[kind] += 1
        out.add_(float(sum(runs.values())) if step_now[0] == 5 else 1.0)

    step_now = [0]
    report = verify(
        lambda: run("eager"),
        lambda: run("replay"),
        inputs=lambda step: step_now.__setitem__(0, step),
        watch={"out": out},
        steps=8,
    )
    assert report.difference is None
    assert [(d.name, d.step) for d in report.unstable] == [("out", 5)]
    assert runs == {"eager": 8 + 2 + 1, "replay": 8 + 1}
    before_step_5 = (2 + 2 + 1 + 1 + 1) + 5
    assert out.item() == 7 + before_step_5 + 4  # as the second replay of step 5 left it


def test_a_replay_that_trips_over_what_was_spoiled_is_reported() -> None:
    table, index, out = torch.arange(4.0), torch.zeros(1, dtype=torch.int64), torch.zeros(1)

    def eager() -> None:
        index.zero_()
        torch.index_select(table, 0, index, out=out)

    report = verify(
        eager,
        lambda: torch.index_select(table, 0, index, out=out),  # the index is not rewritten
        inputs=lambda step: None,
        watch={"out": out},
        steps=3,
        poison=lambda: index.fill_(1 << 40),
    )
    assert not report.ok
    assert report.steps == 0
    assert "step 0: the replay failed: IndexError: index out of range" in str(report)


def test_random_states_are_the_same_for_every_run() -> None:
    step = Step()
    graph = HostGraph("random")

    def run() -> None:
        step.out.copy_(torch.rand(6, 2))

    graph.capture(run)
    assert step.check(graph, run, poison=None).ok


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.bfloat16, torch.int64, torch.complex64]
)
def test_every_element_size_is_compared(dtype: torch.dtype) -> None:
    values = torch.zeros(3, 2, dtype=dtype).t()
    report = verify(
        lambda: None,
        lambda: values[1, 2].fill_(1),
        inputs=lambda step: None,
        watch={"values": values},
        steps=1,
    )
    assert report.difference.index == (1, 2)
    assert report.difference.num_elements == 1


def test_signed_zeros_differ_and_nans_do_not() -> None:
    values = torch.zeros(2)
    payload = torch.tensor([0x7FC00001, 0], dtype=torch.int32).view(torch.float32)

    def compare(a: Tensor, b: Tensor) -> Any:
        return verify(
            lambda: values.copy_(a), lambda: values.copy_(b),
            inputs=lambda step: None, watch={"values": values}, steps=1,
        )  # fmt: skip

    assert compare(torch.tensor([float("nan"), 0.0]), payload).ok
    assert not compare(torch.tensor([0.0, 0.0]), torch.tensor([-0.0, 0.0])).ok
