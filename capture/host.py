"""The host backend: recorded torch operations, replayed into the same memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import Tensor

from .arena import Arena
from .bind import Binder
from .compiled import plain
from .graph import Graph, GraphInfo, GraphState
from .prepack import PackedLinear, PackedWeights
from .record import grad_mode, record

T = TypeVar("T")


class HostGraph(Graph):
    """A program on CPU tensors, replayed operation by operation without its Python code.

    Follows the rules of a CUDA graph, so that what captures here captures there. Intermediates
    live in `arena`, which a family of graphs shares, as it shares `packed` weights. A replay
    equals an eager run bit for bit unless linears are packed.
    """

    def __init__(
        self,
        name: str,
        *,
        arena: Arena | None = None,
        untouched: Iterable[Tensor] = (),
        packed: PackedWeights | None = None,
    ) -> None:
        super().__init__(name)
        self._arena = arena or Arena()
        self._untouched = tuple(untouched)
        self._packed = packed or PackedWeights(())
        self._packs: tuple[PackedLinear, ...] = ()
        self._calls: list[Callable[[], Any]] = []
        self._kinds: Counter[str] = Counter()
        self._operations: Counter[str] = Counter()
        self._memory_bytes = self._packed_bytes = 0
        self._inference = False

    @property
    def info(self) -> GraphInfo:
        """Operations by how they are replayed; growth of arena, outputs and packed weights."""
        self._require(GraphState.READY, "info")
        return GraphInfo(
            node_count=len(self._calls),
            capture_seconds=self._capture_seconds,
            memory_bytes=self._memory_bytes,
            kinds=dict(self._kinds),
            operations=dict(self._operations),
            packed_bytes=self._packed_bytes,
        )

    def run_eagerly(self, fn: Callable[[], T]) -> T:
        """Compiled functions run plainly, as they were recorded."""
        with plain():
            return fn()

    def weights_changed(self) -> None:
        """Pack weights anew at the next replay."""
        super().weights_changed()
        for pack in self._packs:
            pack.forget()

    def _capture(self, fn: Callable[[], T]) -> T:
        outputs, finish = record(fn, untouched=self._untouched)
        recording = finish()
        self._inference = recording.inference
        packed_before = self._packed.nbytes
        with recording.mode():
            binder = Binder(recording, self._arena, self._packed)
            for name, kind, call in binder.calls():
                self._kinds[kind] += 1
                self._operations[name] += 1
                self._calls.append(call)
            binder.poison()
        self._packs = binder.packs
        self._packed_bytes = self._packed.nbytes - packed_before
        self._memory_bytes = binder.memory_bytes + self._packed_bytes
        return outputs

    def _replay(self) -> None:
        with grad_mode(self._inference):
            for pack in self._packs:
                pack.refresh()
            for call in self._calls:
                call()

    def _close(self) -> None:
        self._calls.clear()
        self._packs = ()
