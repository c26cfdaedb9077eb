"""The eager backend: no graph at all, with the interface and the side effects of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map_only

from .compiled import plain
from .graph import Graph, GraphInfo, GraphState
from .record import grad_mode
from .storages import Preserved, PreserveMode, random_state_preserved

T = TypeVar("T")


class EagerGraph(Graph):
    """Runs the program itself at each replay and copies its outputs to fixed addresses."""

    def __init__(
        self, name: str, *, device: torch.device, untouched: Iterable[Tensor] = ()
    ) -> None:
        super().__init__(name)
        self._device = device
        self._untouched = tuple(untouched)
        self._program: Callable[[], Any] | None = None
        self._outputs: list[Tensor] = []
        self._inference = False

    @property
    def info(self) -> GraphInfo:
        """No nodes: nothing was captured. `memory_bytes` are those of the fixed outputs."""
        self._require(GraphState.READY, "info")
        return GraphInfo(
            node_count=0,
            capture_seconds=self._capture_seconds,
            memory_bytes=sum(output.nbytes for output in self._outputs),
        )

    def _capture(self, fn: Callable[[], T]) -> T:
        self._inference = torch.is_inference_mode_enabled()
        preserved = Preserved(self._untouched)
        try:
            with random_state_preserved(self._device), grad_mode(self._inference):
                with plain(), PreserveMode(preserved):
                    outputs = fn()
                fixed: T = tree_map_only(Tensor, torch.clone, outputs)
        finally:
            preserved.restore()
        self._program = fn
        self._outputs = list(_tensors(fixed))
        return fixed

    def _replay(self) -> None:
        assert self._program is not None
        with grad_mode(self._inference):
            for fixed, output in zip(self._outputs, _tensors(self._program()), strict=True):
                fixed.copy_(output)

    def _close(self) -> None:
        self._program = None
        self._outputs.clear()


def _tensors(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_iter(outputs) if isinstance(leaf, Tensor)]
