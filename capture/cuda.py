"""The CUDA backend: `torch.cuda.CUDAGraph` on one stream, in one pool per family."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any, TypeVar

import torch

from .compiled import compiled_already
from .errors import CaptureError
from .graph import Graph, GraphInfo, GraphState
from .inspect import Node, copies, faults, kinds, operations, walk
from .record import grad_mode

T = TypeVar("T")


class CudaGraph(Graph):
    """A program on CUDA tensors, captured once and launched as one graph.

    `stream` is the stream of warm-up, capture and replay: cuBLAS keeps a workspace per handle
    and stream, and the one that a graph has captured must not be another's. Warm the program on
    it before. Graphs of one `pool` must be replayed one at a time, in stream order.

    The graph keeps its program alive, and with it every module, compiled kernel and buffer that
    the program refers to: a graph holds addresses, not references.

    `cuda` is `torch.cuda`, or what stands for it in a test.
    """

    collects_garbage = True

    def __init__(
        self,
        name: str,
        *,
        device: torch.device,
        stream: torch.cuda.Stream,
        pool: Any,
        cuda: ModuleType = torch.cuda,
    ) -> None:
        super().__init__(name)
        self._device = device
        self._stream = stream
        self._pool = pool
        self._cuda = cuda
        self._program: Callable[[], Any] | None = None
        self._graph: Any = None
        self._memory_bytes = 0
        self._instantiate_seconds = 0.0
        self._launched = False
        self._nodes: tuple[Node, ...] | None = None

    @property
    def info(self) -> GraphInfo:
        """Nodes, read from the driver at the first use; pool and executable in bytes."""
        nodes = self.nodes()
        return GraphInfo(
            node_count=len(nodes),
            capture_seconds=self._capture_seconds,
            memory_bytes=self._memory_bytes,
            kinds=kinds(nodes),
            operations=operations(nodes),
            copies=copies(nodes),
            instantiate_seconds=self._instantiate_seconds,
            faults=tuple(faults(nodes)),
        )

    def nodes(self, driver: Any = None) -> tuple[Node, ...]:
        """The nodes of the captured graph. Raises `GraphStateError` unless it is ready."""
        self._require(GraphState.READY, "inspection")
        if self._nodes is None:
            self._nodes = walk(self._graph.raw_cuda_graph(), driver)
        return self._nodes

    def _capture(self, fn: Callable[[], T]) -> T:
        self._program = fn
        self._graph = self._cuda.CUDAGraph(keep_graph=True)
        self._cuda.synchronize(self._device)
        self._cuda.empty_cache()
        reserved = self._cuda.memory_reserved(self._device)
        with (
            self._cuda.stream(self._stream),
            grad_mode(torch.is_inference_mode_enabled()),
            compilation_refused(self.name),
            compiled_already(),
        ):
            outputs = self._record(fn)
        pool_bytes = self._cuda.memory_reserved(self._device) - reserved
        free, _ = self._cuda.mem_get_info(self._device)
        started = time.perf_counter()
        self._graph.instantiate()
        self._instantiate_seconds = time.perf_counter() - started
        executable_bytes = free - self._cuda.mem_get_info(self._device)[0]
        self._memory_bytes = pool_bytes + max(0, executable_bytes)
        return outputs

    def _record(self, fn: Callable[[], T]) -> T:
        """Other threads may call CUDA meanwhile: only this thread's calls can break the capture."""
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            outputs = fn()
        except BaseException:
            self._abandon()
            raise
        self._graph.capture_end()
        return outputs

    def _abandon(self) -> None:
        """Leave capture mode after an error; what the driver says to that is not the cause."""
        with suppress(RuntimeError):
            self._graph.capture_end()

    def _replay(self) -> None:
        self._launched = True
        with self._cuda.stream(self._stream):
            self._graph.replay()

    def _close(self) -> None:
        """The device may still run the graph: wait for the stream before its memory goes."""
        try:
            if self._launched:
                self._stream.synchronize()
        finally:
            if self._graph is not None:
                self._graph.reset()
            self._graph = self._program = self._nodes = None


@contextmanager
def compilation_refused(name: str) -> Iterator[None]:
    """Make Triton refuse to compile: during capture that loads a module, which CUDA forbids, and
    it says that the warm-up did not see what is captured."""
    triton = sys.modules.get("triton")
    if triton is None:
        yield
        return

    def refuse(*, repr: str, **_: Any) -> bool:
        raise CaptureError(
            f"graph {name!r}: Triton compiles {repr} during capture, so the warm-up ran another "
            "variant. Warm the program with the shapes, dtypes and alignments of the capture."
        )

    knobs = triton.knobs.runtime
    before = knobs.jit_cache_hook
    knobs.jit_cache_hook = refuse
    try:
        yield
    finally:
        knobs.jit_cache_hook = before
