"""The CUDA backend: its sequence of calls with a stand-in, and on a GPU the real thing.

The stand-in checks order and restoration only. What it cannot check is under the `gpu` marker.
"""

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphattn._capture.cuda import CudaGraph, compilation_refused
from graphattn._capture.errors import CaptureError, GraphStateError
from graphattn._capture.family import capture_family
from graphattn._capture.graph import GraphState
from graphattn._capture.inspect import faults
from graphattn._capture.verify import verify


class FakeCuda:
    """Records the calls that the backend makes; memory grows by what the program says."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.reserved = 0
        self.free = 1 << 30
        self.capturing = False
        outer = self

        class Stream:
            def synchronize(self) -> None:
                outer.calls.append("stream.synchronize")

        class CUDAGraph:
            def __init__(self, keep_graph: bool = False) -> None:
                outer.calls.append(("graph", keep_graph))

            def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
                outer.calls.append(("begin", pool, capture_error_mode))
                outer.capturing = True

            def capture_end(self) -> None:
                outer.calls.append("end")
                outer.capturing = False
                if outer.broken:
                    raise RuntimeError("capture was invalidated")

            def instantiate(self) -> None:
                outer.calls.append("instantiate")
                outer.free -= 4096

            def replay(self) -> None:
                outer.calls.append("replay")

            def reset(self) -> None:
                outer.calls.append("reset")

        self.broken = False
        self.CUDAGraph = CUDAGraph
        self.Stream = Stream

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.calls.append("stream+")
        yield
        self.calls.append("stream-")

    def synchronize(self, device: Any) -> None:
        self.calls.append("synchronize")

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")

    def memory_reserved(self, device: Any) -> int:
        return self.reserved

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        return self.free, 1 << 30

    def graph(self) -> CudaGraph:
        return CudaGraph(
            "fake", device=torch.device("cuda", 0), stream=self.Stream(), pool=(1, 0), cuda=self
        )


def test_sequence_of_a_capture() -> None:
    cuda = FakeCuda()
    seen = []

    def program() -> str:
        cuda.reserved += 1 << 20
        seen.append((cuda.capturing, gc.isenabled(), torch.is_grad_enabled()))
        return "outputs"

    graph = cuda.graph()
    assert graph.capture(program) == "outputs"
    assert seen == [(True, False, False)]  # once: a capture runs nothing twice
    assert cuda.calls == [
        ("graph", True), "synchronize", "empty_cache", "stream+",
        ("begin", (1, 0), "thread_local"), "end", "stream-", "instantiate",
    ]  # fmt: skip
    assert gc.isenabled()
    assert graph._memory_bytes == (1 << 20) + 4096
    del cuda.calls[:]
    graph.replay()
    assert cuda.calls == ["stream+", "replay", "stream-"]
    del cuda.calls[:]
    graph.close()
    graph.close()
    assert cuda.calls == ["stream.synchronize", "reset"]
    with pytest.raises(GraphStateError, match="replay needs a graph that is ready"):
        graph.replay()
    with pytest.raises(GraphStateError, match="inspection needs a graph that is ready"):
        graph.nodes()


def test_garbage_is_collected_before_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph in a cycle is destroyed then, not by a collection in the middle."""
    cuda, events = FakeCuda(), []
    monkeypatch.setattr(gc, "collect", lambda: events.append("collect"))
    cuda.graph().capture(lambda: events.append("program"))
    assert events == ["collect", "program"]


@pytest.mark.parametrize("broken", [False, True], ids=["end works", "end raises too"])
def test_an_error_in_the_program_leaves_capture_mode(broken: bool) -> None:
    cuda = FakeCuda()
    cuda.broken = broken

    def program() -> None:
        raise KeyError("mine")

    graph = cuda.graph()
    with pytest.raises(KeyError, match="mine"):
        graph.capture(program)
    assert cuda.calls[4:] == [("begin", (1, 0), "thread_local"), "end", "reset"]
    assert not cuda.capturing
    assert graph.state is GraphState.CLOSED
    assert gc.isenabled()


def test_the_program_is_held_until_close() -> None:
    """A reference count alone could unload a module while another graph is captured."""
    held: list[Any] = []

    class Program:
        def __call__(self) -> None:
            pass

        def __del__(self) -> None:
            held.append("gone")

    graph = FakeCuda().graph()
    graph.capture(Program())
    gc.collect()
    assert held == []
    graph.close()
    assert held == ["gone"]


def test_triton_may_not_compile_during_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    before = lambda **kwargs: None  # noqa: E731
    runtime = SimpleNamespace(jit_cache_hook=before)
    monkeypatch.setitem(
        sys.modules, "triton", SimpleNamespace(knobs=SimpleNamespace(runtime=runtime))
    )
    with (
        compilation_refused("decode8"),
        pytest.raises(CaptureError, match=r"'decode8': Triton compiles attend\(.* during capture"),
    ):
        runtime.jit_cache_hook(key=1, repr="attend(...)", fn=None, compile=None)
    assert runtime.jit_cache_hook is before


def test_triton_has_the_hook() -> None:
    import triton

    assert hasattr(triton.knobs.runtime, "jit_cache_hook")
    with compilation_refused("x"):
        assert triton.knobs.runtime.jit_cache_hook is not None
    assert triton.knobs.runtime.jit_cache_hook is None


def test_torch_has_what_the_backend_calls() -> None:
    for name in (
        "capture_begin",
        "capture_end",
        "instantiate",
        "replay",
        "reset",
        "raw_cuda_graph",
    ):
        assert callable(getattr(torch.cuda.CUDAGraph, name))
    for name in ("synchronize", "empty_cache", "memory_reserved", "mem_get_info", "stream"):
        assert callable(getattr(torch.cuda, name))


# From here on a CUDA device is needed.


class GpuStep:
    """A self-feeding step on the device, for several numbers of rows."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weight = torch.randn(64, 64, device="cuda") / 8
        self.state = torch.randn(8, 64, device="cuda")
        self.count = torch.zeros(1, dtype=torch.int64, device="cuda")

    def program(self, rows: int) -> Any:
        def step() -> None:
            h = torch.nn.functional.silu(self.state[:rows] @ self.weight)
            self.state[:rows].copy_(h.softmax(-1) + torch.arange(rows, device="cuda")[:, None])
            self.count.add_(1)

        return step

    def family(self, *rows: int) -> dict[int, Any]:
        graphs = capture_family(
            {f"{r}": self.program(r) for r in rows},
            backend="cuda",
            device=torch.device("cuda", torch.cuda.current_device()),
            stream=torch.cuda.Stream(),
        )
        return {int(name): graph for name, graph in graphs.items()}


@pytest.mark.gpu
def test_gpu_capture_leaves_no_trace_and_replays_equal_eager() -> None:
    step = GpuStep()
    before = {name: tensor.clone() for name, tensor in vars(step).items()}
    rng = torch.cuda.get_rng_state()
    graphs = step.family(8, 4, 1)
    assert all(torch.equal(before[name], tensor) for name, tensor in vars(step).items())
    assert torch.equal(rng, torch.cuda.get_rng_state())
    for rows, graph in graphs.items():
        report = verify(step.program(rows), graph, inputs=lambda i: None, watch=vars(step), steps=3)
        assert report.ok, str(report)
        assert faults(graph.nodes()) == []
        assert graph.info.kinds["kernel"] >= 3
        assert graph.info.memory_bytes >= 0


@pytest.mark.gpu
def test_gpu_many_graphs_of_one_pool_interleaved() -> None:
    step, eager = GpuStep(), GpuStep()
    graphs = step.family(8, 7, 6, 5, 4, 3, 2, 1)
    for i in range(64):
        rows = 1 + i * 5 % 8
        graphs[rows].replay()
        eager.program(rows)()
    torch.cuda.synchronize()
    assert torch.equal(step.state, eager.state)
    assert int(step.count) == 64


@pytest.mark.gpu
def test_gpu_replays_allocate_nothing() -> None:
    step = GpuStep()
    graphs = step.family(8, 1)
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(1000):
        graphs[8].replay()
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations


@pytest.mark.gpu
def test_gpu_capture_beside_a_busy_thread() -> None:
    stop = threading.Event()

    def busy() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while not stop.is_set():
                torch.ones(1024).pin_memory().to("cuda", non_blocking=True).sum().item()

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        graphs = GpuStep().family(8, 4)
    finally:
        stop.set()
        thread.join()
    graphs[8].replay()
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_gpu_an_error_names_the_program_and_the_next_capture_works() -> None:
    step = GpuStep()

    def reads() -> None:
        if torch.cuda.is_current_stream_capturing():
            step.count.item()

    with pytest.raises(CaptureError, match="program 'reads'"):
        capture_family(
            {"reads": reads},
            backend="cuda",
            device=torch.device("cuda", 0),
            stream=torch.cuda.Stream(),
        )
    torch.cuda.synchronize()
    step.family(4)[4].replay()
    torch.cuda.synchronize()
    assert int(step.count) == 1
