"""Device to host: what each step published. The only reader of device data."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from graphattn._capture import nvtx_ranges
from graphattn.bounds import Bounds
from graphattn.inputs import block_size, block_views
from graphattn.stream import Marker, Stream, host_buffer

WAIT_SECONDS = 0.0002  # between two looks at a marker when the wait is bounded


def output_fields(bounds: Bounds) -> dict[str, tuple[int, ...]]:
    """Name and shape of every field of the block, in its order."""
    rows = (bounds.max_batch,)
    return {
        "slot": rows,
        "generation": rows,
        "count": rows,
        "finish": rows,
        "context_len": rows,
        "logits_count": rows,
        "tokens": (bounds.max_batch, bounds.decode_query_len),
        "logprobs": (bounds.max_batch, bounds.decode_query_len),
    }


class OutputBlock:
    """What a step publishes, at a fixed device address; each field is a view, int32, by row."""

    slot: Tensor  # [B]; -1 = padding row
    generation: Tensor  # [B]
    count: Tensor  # [B] emitted tokens
    finish: Tensor  # [B], a `Finish`
    context_len: Tensor  # [B] after the step
    logits_count: Tensor  # [B] places that were sampled: 1 + drafts, or 0
    tokens: Tensor  # [B, 1 + K]; -1 past count
    logprobs: Tensor  # [B, 1 + K] fp32; of the tokens

    def __init__(self, bounds: Bounds, device: torch.device) -> None:
        fields = output_fields(bounds)
        self.block = torch.zeros(block_size(fields), dtype=torch.int32, device=device)
        for name, view in block_views(self.block, fields).items():
            setattr(self, name, view.view(torch.float32) if name == "logprobs" else view)


class RowResult(NamedTuple):
    """What one row of a landed step says; matched to its request by slot and generation."""

    slot: int  # -1 = padding row
    generation: int
    emitted: int  # tokens
    finish: int
    context_len: int
    logits_count: int  # places that were sampled: 1 + drafts, or 0
    tokens: list[int]  # anything past those emitted, as in `logprobs`
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class StepResult:
    """A landed step."""

    number: int
    rows: tuple[RowResult, ...]


class _Entry:
    def __init__(self, bounds: Bounds, size: int, device: torch.device) -> None:
        fields = output_fields(bounds)
        self.buffer = host_buffer(size, device)
        self.arrays: dict[str, npt.NDArray[Any]] = {
            name: view.numpy() for name, view in block_views(self.buffer, fields).items()
        }
        self.arrays["logprobs"] = self.arrays["logprobs"].view(np.float32)

    def read(self, number: int) -> StepResult:
        columns = [array.tolist() for array in self.arrays.values()]
        rows = tuple(map(RowResult._make, zip(*columns, strict=True)))
        return StepResult(number, rows)


class OutputRing:
    """Pinned copies of the output block, one per step in flight, read in order of launch."""

    def __init__(self, bounds: Bounds, device: torch.device, *, steps_in_flight: int) -> None:
        sizes = self.sizes(bounds, steps_in_flight=steps_in_flight)
        self._idle = deque(_Entry(bounds, size, device) for size in sizes)
        self._flying: deque[tuple[int, _Entry, Marker]] = deque()

    @staticmethod
    def sizes(bounds: Bounds, *, steps_in_flight: int) -> list[int]:
        """int32 values of each buffer."""
        return [block_size(output_fields(bounds))] * steps_in_flight

    @property
    def in_flight(self) -> int:
        """Steps whose results were not read."""
        return len(self._flying)

    @property
    def has_room(self) -> bool:
        """Whether one more step can be launched."""
        return bool(self._idle)

    def make_room(self) -> None:
        """Wait until one more step can be launched, for a caller who wants no results."""
        while not self.has_room:
            self.wait()
            self.landed()

    def receive(self, number: int, source: OutputBlock, stream: Stream) -> None:
        """Enqueue the copy of `source` behind the step that fills it."""
        entry = self._idle.popleft()
        stream.copy(entry.buffer, source.block)
        self._flying.append((number, entry, stream.mark()))

    def landed(self) -> list[StepResult]:
        """Results that have arrived since the last call, oldest first. Never waits."""
        results = []
        while self._flying and self._flying[0][2].done():
            number, entry, _ = self._flying.popleft()
            results.append(entry.read(number))
            self._idle.append(entry)
        return results

    def wait(self, timeout: float = math.inf) -> None:
        """Wait until the oldest step in flight has landed, at most `timeout` seconds."""
        if not self._flying:
            return
        with nvtx_ranges.scope("wait"):
            self._wait(self._flying[0][2], timeout)

    def _wait(self, marker: Marker, timeout: float) -> None:
        if math.isinf(timeout):
            return marker.wait()
        end = time.monotonic() + timeout
        while not marker.done() and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, WAIT_SECONDS))
