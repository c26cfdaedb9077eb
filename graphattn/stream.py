"""The one ordered queue of device work: every copy, replay and marker of an engine goes through it.

On a GPU it is one explicit CUDA stream (cuBLAS workspaces belong to a handle and a stream, so
warm-up, capture, replay and verification must share it). On a CPU work runs at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Marker(Protocol):
    """A point in the queue."""

    def done(self) -> bool:
        """Whether all work before it has ended. Never waits."""
        ...

    def wait(self) -> None:
        """Wait until it is done."""
        ...


class Stream(Protocol):
    """Work runs in the order of submission."""

    def submit(self, work: Callable[[], object]) -> None:
        """Enqueue `work`; what it launches runs after everything submitted before."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy. A pinned `source` or `target` must be left alone until a later marker."""
        ...

    def mark(self) -> Marker:
        """A marker behind everything submitted so far."""
        ...

    def join(self) -> None:
        """Later work runs after what the caller has enqueued elsewhere, such as new weights."""
        ...

    def precede(self) -> None:
        """What the caller enqueues elsewhere from now on runs after everything submitted so far."""
        ...


class _Done:
    """The marker of a queue that runs everything at once."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class HostStream:
    """CPU: submitted work runs before `submit` returns."""

    def submit(self, work: Callable[[], object]) -> None:
        """Run it."""
        work()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy now."""
        target.copy_(source)

    def mark(self) -> Marker:
        """Already done."""
        return _Done()

    def join(self) -> None:
        """Everything has run."""

    def precede(self) -> None:
        """Everything has run."""


class _CudaMarker:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class CudaStream:
    """One explicit, non-default CUDA stream of `device`."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = torch.cuda.Stream(device)

    def submit(self, work: Callable[[], object]) -> None:
        """Launch `work` with this stream current."""
        with torch.cuda.stream(self.cuda):
            work()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue an asynchronous copy."""
        with torch.cuda.stream(self.cuda):
            target.copy_(source, non_blocking=True)

    def mark(self) -> Marker:
        """Record an event."""
        event = torch.cuda.Event()
        event.record(self.cuda)
        return _CudaMarker(event)

    def join(self) -> None:
        """Wait, on the device, for the caller's current stream."""
        self.cuda.wait_stream(torch.cuda.current_stream(self.cuda.device))

    def precede(self) -> None:
        """Let the caller's current stream wait, on the device."""
        torch.cuda.current_stream(self.cuda.device).wait_stream(self.cuda)


def open_stream(device: torch.device) -> HostStream | CudaStream:
    """The stream for `device`."""
    return CudaStream(device) if device.type == "cuda" else HostStream()


def host_buffer(size: int, device: torch.device) -> Tensor:
    """int32 [size] on the host, pinned where the device copies asynchronously."""
    return torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
