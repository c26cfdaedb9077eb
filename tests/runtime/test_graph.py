"""Graph, audit and verify on programs that know nothing of attention."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

import graphattn
from graphattn import Graph
from graphattn._capture.errors import GraphStateError
from graphattn.errors import ConfigError
from graphattn.stream import HostStream

each_backend = pytest.mark.parametrize("backend", ["host", "eager"])


class Counter:
    """A program with an input, a state and an output."""

    def __init__(self, size: int = 4) -> None:
        self.x, self.total = torch.ones(size), torch.zeros(size)
        self.scale = 2.0  # Python: frozen

    def __call__(self) -> Tensor:
        self.total += self.x * self.scale
        return self.total * 10


@each_backend
def test_contents_change_between_replays_and_nothing_else(backend: str) -> None:
    counter = Counter()
    with Graph(counter, device="cpu", backend=backend, name="count") as graph:
        assert graph.name == "count"
        assert not counter.total.any(), "capture leaves no trace"
        address = graph.outputs.data_ptr()
        for x, want in ((1.0, 20.0), (3.0, 80.0)):
            counter.x.fill_(x)
            graph.replay()
            assert graph.outputs.tolist() == [want] * 4
        assert graph.outputs.data_ptr() == address
        assert graph.info.capture_seconds > 0


def test_python_is_frozen() -> None:
    counter = Counter()
    with Graph(counter, device="cpu") as graph:
        counter.scale = 5.0
        graph.replay()
        assert graph.outputs.tolist() == [20.0] * 4
        assert graph.run_eagerly().tolist() == [70.0] * 4


@each_backend
def test_random_numbers_are_new_in_every_replay(backend: str) -> None:
    torch.manual_seed(3)
    want = [torch.rand(5), torch.rand(5)]
    torch.manual_seed(3)
    with Graph(lambda: torch.rand(5), device="cpu", backend=backend) as graph:
        for numbers in want:
            graph.replay()
            assert torch.equal(graph.outputs, numbers)


@each_backend
def test_a_family_shares_memory_but_no_outputs(backend: str) -> None:
    state = torch.arange(8.0)
    programs = {str(n): (lambda n=n: (state[:n] * 2 + 1).cumsum(0) - 1) for n in (8, 4, 2)}
    graphs = Graph.family(programs, device="cpu", backend=backend)
    assert list(graphs) == ["8", "4", "2"]
    for graph in graphs.values():
        graph.replay()
    for n, graph in graphs.items():
        assert torch.equal(graph.outputs, programs[n]())
    graphs["8"].close()
    state += 1
    graphs["4"].replay()
    assert torch.equal(graphs["4"].outputs, programs["4"]())
    for graph in graphs.values():
        graph.close()


@each_backend
def test_a_closed_graph_lets_go(backend: str) -> None:
    counter = Counter()
    graph = Graph(counter, device="cpu", backend=backend)
    total = weakref.ref(counter.total.untyped_storage())
    graph.close()
    graph.close()
    assert graph.outputs is None
    for use in (graph.replay, graph.run_eagerly, graph.weights_changed, lambda: graph.info):
        with pytest.raises(GraphStateError, match="is closed"):
            use()
    del counter, use
    gc.collect()
    assert total() is None


@torch.no_grad()
def test_packed_weights_follow_updates() -> None:
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(512, 512), torch.randn(3, 512)
    weights = dict(linear.named_parameters())
    with Graph(lambda: linear(x), device="cpu", weights=weights, prepack=True) as graph:
        for _ in range(2):
            graph.replay()
            torch.testing.assert_close(graph.outputs, linear(x))
            linear.weight.mul_(-2)
        linear.weight.data[3, 5] = 40  # neither counted nor, most likely, looked at
        graph.weights_changed()
        graph.replay()
        torch.testing.assert_close(graph.outputs, linear(x))
        assert graph.info.memory_bytes > linear.weight.nbytes, "a second copy"
    with pytest.raises(ConfigError, match="weights: wanted the weights to pack"):
        Graph(lambda: linear(x), device="cpu", prepack=True)


def test_work_of_the_caller_comes_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay and an eager run stand where they were called in the caller's own stream."""
    calls: list[str] = []

    class Recorded(HostStream):
        def join(self) -> None:
            calls.append("join")

        def precede(self) -> None:
            calls.append("precede")

    monkeypatch.setattr("graphattn.graph.open_stream", lambda device: Recorded())
    with Graph(lambda: calls.append("work"), device="cpu", backend="eager") as graph:
        assert calls[0] == "join"
        assert calls[-1] == "precede"
        for run in (graph.replay, graph.run_eagerly):
            calls.clear()
            run()
            assert calls == ["join", "work", "precede"]


def test_refusals_name_the_program_and_the_line() -> None:
    x = torch.ones(3)

    def reads() -> None:
        if x.sum() > 2:
            x.mul_(2)

    message = r"(?s)program 'reads': .*device value on the host.*test_graph.py:.*if x.sum\(\) > 2"
    with pytest.raises(graphattn.CaptureError, match=message):
        Graph(reads, device="cpu")
    assert x.tolist() == [1, 1, 1]


def test_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="programs: wanted callables"):
        Graph(torch.ones(2), device="cpu")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="programs: wanted callables"):
        Graph.family({}, device="cpu")
    with pytest.raises(ConfigError, match="backend: wanted 'auto', 'cuda'"):
        Graph(Counter(), device="cpu", backend="cpu")
    with pytest.raises(ConfigError, match="backend: wanted one that fits"):
        Graph(Counter(), device="cpu", backend="cuda")
    with pytest.raises(ConfigError, match=r"graph: wanted a graphattn.Graph, got 'Counter'"):
        graphattn.verify(Counter(), inputs=id, watch={})  # type: ignore[arg-type]


def test_verify_finds_nothing_in_a_sound_program() -> None:
    counter = Counter()
    with Graph(counter, device="cpu") as graph:
        report = graphattn.verify(
            graph, inputs=lambda i: counter.x.fill_(i), watch={"total": counter.total}, steps=3
        )
    assert report.ok, report
    assert counter.total.tolist() == [6, 6, 6, 6], "the state goes on from the replays"


def test_verify_names_what_is_frozen() -> None:
    counter = Counter()

    def inputs(step: int) -> None:
        counter.scale = 2.0 + step

    with Graph(counter, device="cpu") as graph:
        report = graphattn.verify(graph, inputs=inputs, watch={"total": counter.total})
    assert str(report.difference).startswith("step 1: total[0] is 5.0 eagerly and 4.0 otherwise")


def test_verify_names_outputs_of_a_lasting_host_state() -> None:
    numbers: list[float] = []

    def counts() -> Tensor:
        numbers.append(0.0)
        return torch.full((2,), float(len(numbers)))

    with Graph(counts, device="cpu") as graph:
        report = graphattn.verify(graph, inputs=lambda i: None, watch={})
    assert [x.name for x in report.unstable] == ["outputs[0]"]


def test_verify_spoils_what_must_be_written_anew() -> None:
    x, scratch = torch.ones(4), torch.zeros(4)

    def relies_on_a_clean_tail() -> Tensor:
        scratch[:2].copy_(x[:2])
        return scratch + 0

    def poison() -> None:
        scratch.fill_(float("nan"))

    with Graph(relies_on_a_clean_tail, device="cpu") as graph:
        inputs = x.fill_
        assert graphattn.verify(graph, inputs=inputs, watch={}).ok
        report = graphattn.verify(graph, inputs=inputs, watch={}, poison=poison)
    assert report.difference is not None
    assert report.difference.index == (2,)


def test_audit_lists_every_finding_with_its_line() -> None:
    x = torch.ones(4)

    def reads_and_makes() -> Tensor:
        count = int(x.sum().item())
        return x * torch.tensor([1.0, 2.0, 3.0, 4.0]) + count

    report = graphattn.audit(reads_and_makes)
    assert not report.ok
    assert [f.category for f in report.findings][:2] == ["host read", "tensor from Python data"]
    assert all(f.file.endswith("test_graph.py") for f in report.findings)
    assert graphattn.audit(lambda: x * 2).ok
