"""The graph protocol: what a captured program is, whatever captured it.

    NEW --capture()--> CAPTURING --> READY --replay()--> READY
     |                     |           |
     +------close()--------+-----------+--> CLOSED      (a failed capture closes the graph)

A graph replays the device work of one program over the memory that the program used while it
was captured. The host code of the program never runs again: what it read from Python then is
frozen, what it reads from tensors is read anew in each replay.
"""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from .errors import GraphStateError

T = TypeVar("T")


class GraphState(Enum):
    """States of a graph, in the order in which it passes through them."""

    NEW = "new"
    CAPTURING = "capturing"
    READY = "ready"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class GraphInfo:
    """What a captured graph is made of.

    `node_count` is the number of launched operations, `kinds` their number by kind, `operations`
    by the name of the operation or kernel, `copies` those of copies by their direction.
    `capture_seconds` is the wall time of the capture, `instantiate_seconds` what of it made the
    graph executable. `memory_bytes` is the memory by which the capture of this graph has made the
    process grow (pool or arena, outputs, executable graph), `packed_bytes` what of it are copies
    of weights. `faults` are nodes that a static step must not have, each in words; a host graph
    refuses to capture what would be one.
    """

    node_count: int
    capture_seconds: float
    memory_bytes: int
    kinds: Mapping[str, int] = field(default_factory=dict)
    operations: Mapping[str, int] = field(default_factory=dict)
    copies: Mapping[str, int] = field(default_factory=dict)
    instantiate_seconds: float = 0.0
    packed_bytes: int = 0
    faults: tuple[str, ...] = ()


class Graph(ABC):
    """One captured program.

    Not thread-safe; graphs that share a pool or an arena must not be replayed at the same time,
    and a replay overwrites the intermediates (not the outputs) of the others.
    """

    collects_garbage = False  # before its capture; costs a third of a second in a large process

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = GraphState.NEW
        self.outputs: Any = None  # what the program returned; rewritten by every replay
        self._capture_seconds = 0.0

    def capture(self, fn: Callable[[], T]) -> T:
        """Capture `fn` and return its outputs, whose contents are undefined until a replay.

        The tensors that `fn` returns, or keeps elsewhere, stay at their addresses and are
        rewritten by every replay. Memory that existed before, random states and Python's garbage
        collection are the same afterwards as before, whether the capture succeeds or raises.
        Raises `RefusedError` for what a graph cannot hold; the graph is then closed.
        """
        self._require(GraphState.NEW, "capture")
        self.state = GraphState.CAPTURING
        started = time.perf_counter()
        try:
            with gc_paused(collect=self.collects_garbage):
                outputs = self._capture(fn)
        except BaseException:
            self.close()
            raise
        self._capture_seconds = time.perf_counter() - started
        self.state = GraphState.READY
        self.outputs = outputs
        return outputs

    def replay(self) -> None:
        """Run the captured work once. On CUDA this enqueues it and returns."""
        if self.state is not GraphState.READY:
            self._require(GraphState.READY, "replay")
        self._replay()

    def run_eagerly(self, fn: Callable[[], T]) -> T:
        """Run the program itself, as the graph runs it: what a replay must equal."""
        return fn()

    def weights_changed(self) -> None:
        """Weights may have been written unseen: what the graph holds copies of is copied anew."""
        self._require(GraphState.READY, "weights_changed")

    def close(self) -> None:
        """Release the graph and what it keeps alive. Calling it again does nothing."""
        if self.state is not GraphState.CLOSED:
            self.state = GraphState.CLOSED
            self.outputs = None
            self._close()

    @property
    @abstractmethod
    def info(self) -> GraphInfo:
        """What the graph is made of. Raises `GraphStateError` unless it is ready."""

    @abstractmethod
    def _capture(self, fn: Callable[[], T]) -> T: ...

    @abstractmethod
    def _replay(self) -> None: ...

    @abstractmethod
    def _close(self) -> None: ...

    def _require(self, state: GraphState, verb: str) -> None:
        if self.state is not state:
            raise GraphStateError(
                f"graph {self.name!r}: {verb} needs a graph that is {state.value}, "
                f"this one is {self.state.value}."
            )


@contextmanager
def gc_paused(*, collect: bool) -> Iterator[None]:
    """Keep the collector off; its former state returns in any case.

    A collection in the middle of a CUDA capture may destroy another graph or unload a module,
    both of which are calls that invalidate the capture: there, `collect` first, so that little
    is left that could be destroyed by its reference count.
    """
    if not gc.isenabled():
        yield
        return
    if collect:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
