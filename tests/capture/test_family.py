"""Families: order, sharing, progress, and what an error leaves behind (nothing)."""

import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from graphattn._capture import family
from graphattn._capture.errors import CaptureError
from graphattn._capture.family import capture_family
from graphattn._capture.graph import GraphState, gc_paused

CPU = torch.device("cpu")
BACKENDS = ["host", "eager"]


class Buckets:
    """A step for several numbers of rows over one state."""

    def __init__(self) -> None:
        self.state = torch.zeros(8, 4)
        self.pool = torch.zeros(1000)
        self.noise = torch.zeros(8)

    def program(self, rows: int) -> Any:
        def step() -> None:
            self.state[:rows].add_(1)
            self.pool.mul_(1)
            self.noise[:rows].copy_(torch.rand(rows))

        return step

    def programs(self) -> dict[str, Any]:
        return {f"rows{rows}": self.program(rows) for rows in (8, 4, 1)}


@pytest.mark.parametrize("backend", BACKENDS)
def test_capture_leaves_no_trace_and_reports_progress(backend: Any) -> None:
    buckets, seen = Buckets(), []
    rng = torch.get_rng_state()
    graphs = capture_family(
        buckets.programs(),
        backend=backend,
        device=CPU,
        progress=lambda name, done, total: seen.append((name, done, total)),
    )
    assert list(graphs) == ["rows8", "rows4", "rows1"]
    assert seen == [("rows8", 1, 3), ("rows4", 2, 3), ("rows1", 3, 3)]
    assert not buckets.state.any()
    assert not buckets.noise.any()
    assert torch.equal(rng, torch.get_rng_state())
    assert gc.isenabled()
    graphs["rows4"].replay()
    graphs["rows1"].replay()
    assert buckets.state[:, 0].tolist() == [2, 1, 1, 1, 0, 0, 0, 0]
    assert buckets.noise[:4].all()
    assert all(graph.info.capture_seconds > 0 for graph in graphs.values())


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_names_the_program_and_undoes_everything(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    buckets, made, runs = Buckets(), [], []

    def broken() -> None:
        buckets.state.add_(1)
        torch.rand(3)
        runs.append(None)
        raise KeyError("no such layer")

    for name in ("HostGraph", "EagerGraph"):
        original = getattr(family, name)

        def make(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            made.append(original(*args, **kwargs))
            return made[-1]

        monkeypatch.setattr(family, name, make)
    rng = torch.get_rng_state()
    programs = {"good": buckets.program(8), "broken": broken, "last": buckets.program(1)}
    with pytest.raises(CaptureError, match=r"program 'broken': .*no such layer") as caught:
        capture_family(programs, backend=backend, device=CPU)
    assert isinstance(caught.value.__cause__, KeyError)
    assert [graph.name for graph in made] == ["good", "broken"]
    assert all(graph.state is GraphState.CLOSED for graph in made)
    assert not buckets.state.any()
    assert torch.equal(rng, torch.get_rng_state())
    assert gc.isenabled()


def test_an_error_in_warm_up_is_named_too() -> None:
    def broken() -> None:
        raise ValueError("lazy table")

    with pytest.raises(CaptureError, match="program 'small': lazy table"):
        capture_family({"large": lambda: None, "small": broken}, backend="host", device=CPU)
    assert gc.isenabled()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_interrupt_closes_and_restores(backend: Any) -> None:
    buckets = Buckets()

    def progress(name: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture_family(buckets.programs(), backend=backend, device=CPU, progress=progress)
    assert not buckets.state.any()
    assert gc.isenabled()


def test_the_collector_stays_off_if_it_was_off_and_is_off_while_capturing() -> None:
    seen: list[bool] = []
    with gc_paused(collect=False):
        capture_family({"a": lambda: seen.append(gc.isenabled())}, backend="host", device=CPU)
        assert not gc.isenabled()
    assert gc.isenabled()
    capture_family({"a": lambda: seen.append(gc.isenabled())}, backend="host", device=CPU)
    assert not any(seen)


def test_untouched_tensors_are_neither_copied_nor_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    buckets, saved = Buckets(), []
    clone = torch.UntypedStorage.clone
    monkeypatch.setattr(
        torch.UntypedStorage, "clone", lambda s: (saved.append(s.nbytes()), clone(s))[1]
    )
    capture_family(buckets.programs(), backend="host", device=CPU, untouched=[buckets.pool[5:]])
    assert buckets.pool.nbytes not in saved
    assert buckets.state.nbytes in saved


def test_what_programs_make_lazily_is_made_before_the_first_capture() -> None:
    """Else it would belong to one graph, and the others would read it from there."""
    made: list[Tensor] = []
    x = torch.ones(3)

    def program() -> None:
        if not made:
            made.append(torch.full((3,), 2.0))
        x.copy_(x * made[0])

    graphs = capture_family({"a": program, "b": program}, backend="host", device=CPU)
    graphs["b"].replay()
    assert x.tolist() == [2.0] * 3
    assert graphs["a"].info.node_count == 2


def test_another_thread_does_not_disturb_a_capture() -> None:
    stop = threading.Event()
    counter = torch.zeros(1)

    def busy() -> None:
        while not stop.is_set():
            counter.add_(1).item()

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        graphs = capture_family(Buckets().programs(), backend="host", device=CPU)
    finally:
        stop.set()
        thread.join()
    # slices are views; an in-place add, a multiplication, a random fill and its copy remain
    assert [graph.info.node_count for graph in graphs.values()] == [4, 4, 4]


def test_static_outputs_of_the_eager_backend() -> None:
    x = torch.ones(2)
    graph = family.EagerGraph("eager", device=CPU)
    outputs = graph.capture(lambda: {"double": x * 2, "count": 2})
    address = outputs["double"].data_ptr()
    x.fill_(4)
    graph.replay()
    assert outputs["double"].tolist() == [8.0, 8.0]
    assert outputs["double"].data_ptr() == address
    assert graph.info.memory_bytes == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "metal"}, r"backend: wanted 'cuda', 'host' or 'eager', got 'metal'"),
        ({"backend": "cuda"}, r"stream: wanted a torch.cuda.Stream"),
    ],
)
def test_wrong_options(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        capture_family({}, device=CPU, **options)


def test_no_programs_no_graphs() -> None:
    assert capture_family({}, backend="host", device=CPU) == {}
