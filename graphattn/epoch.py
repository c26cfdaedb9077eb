"""Debug mode: attention reads nothing that was not derived since lengths last changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from graphattn.metadata import StepMetadata, stamp_of

FIRST = (1 << 30) + 1  # no length, count, id or filling of a spoiled buffer


@dataclass(frozen=True, slots=True)
class Epoch:
    """A counter on the device that moves on wherever lengths change: as a step begins, at its
    commit, before each further pass of a drafter.

    Every buffer of metadata begins with a stamp: the epoch at which it was derived. Attention
    checks the stamps of the very tensors that it reads, on the device and inside the graph. A
    buffer that this step did not derive, of another engine, step, pass or rank, or made by somebody
    else, has an older stamp or none. Contents are not checked: that is what `Engine.verify` is for.
    """

    counter: Tensor | None = None  # int32 [1]; None: not in debug mode, nothing is done

    @staticmethod
    def start(device: torch.device) -> Epoch:
        """The first epoch."""
        return Epoch(torch.full((1,), FIRST, dtype=torch.int32, device=device))

    def advance(self) -> None:
        """Lengths changed: what was derived before is stale."""
        if self.counter is not None:
            self.counter.add_(1)

    def stamp(self, step: StepMetadata) -> None:
        """Every field of `step` was derived just now."""
        if self.counter is not None:
            for tensor in step.tensors().values():
                stamp_of(tensor).copy_(self.counter)

    def check(self, layer: int, tensors: Mapping[str, Tensor | None]) -> None:
        """Assert on the device that every tensor was derived in this epoch.

        What fails ends the step with a `RuntimeError` on a CPU; on a GPU it is a device assert,
        after which the process has no CUDA any more.
        """
        if self.counter is None:
            return
        for name, tensor in tensors.items():
            if tensor is not None:
                torch._assert_async(
                    stamp_of(tensor) == self.counter,
                    f"attention of layer {layer} reads {name} that this step did not derive",
                )


UNCHECKED = Epoch()
