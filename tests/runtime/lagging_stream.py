"""A stream whose work runs late, to find what relies on it having run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch import Tensor


class _Marker:
    def __init__(self, stream: LaggingStream) -> None:
        self._stream = stream
        self.passed = False

    def done(self) -> bool:
        self._stream.progress()
        return self.passed

    def wait(self) -> None:
        while not self.passed:
            self._stream.run_one()


class LaggingStream:
    """Runs `pace` pieces of work each time somebody asks whether a marker is done.

    A copy reads its source when it runs, as an asynchronous copy from pinned memory does.
    """

    def __init__(self, pace: int) -> None:
        self._pace = pace
        self._work: deque[Callable[[], object]] = deque()

    @property
    def pending(self) -> int:
        return len(self._work)

    def submit(self, work: Callable[[], object]) -> None:
        self._work.append(work)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._work.append(lambda: target.copy_(source))

    def mark(self) -> _Marker:
        marker = _Marker(self)
        self._work.append(lambda: setattr(marker, "passed", True))
        return marker

    def join(self) -> None:
        """Nothing is enqueued elsewhere."""

    def run_one(self) -> None:
        self._work.popleft()()

    def progress(self) -> None:
        for _ in range(min(self._pace, len(self._work))):
            self.run_one()
