"""Where a part of `profiles/gpu.sh` runs, and whether at its real size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """A device; `dry` is a CPU with sizes that it can do."""

    device: torch.device
    dry: bool

    @property
    def dtype(self) -> torch.dtype:
        """bf16 is what a GPU serves; a CPU has it only slowly."""
        return torch.float32 if self.dry else torch.bfloat16

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def replayed(self, work: Callable[[], object]) -> Callable[[], object]:
        """A graph of `work`, called once before; on a CPU the work itself."""
        if self.dry:
            return work
        stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            work()
            with torch.cuda.graph(graph, stream=stream):
                work()
        torch.cuda.synchronize()
        replay: Callable[[], None] = graph.replay
        return replay
