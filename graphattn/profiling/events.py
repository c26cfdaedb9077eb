"""What a profile holds, whatever recorded it. All times are integers in nanoseconds.

A *process* and a *thread* are the recorder's numbers; a thread's number is unique over processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum


class Level(Enum):
    """How much of a replay was recorded."""

    NODE = "node"  # each node with its times
    GRAPH = "graph"  # one entry per launch of a graph


class Kind(Enum):
    """Kinds of work on the device."""

    KERNEL = "kernel"
    COPY = "copy"
    SET = "memset"


class Way(Enum):
    """Direction of a copy."""

    TO_HOST = "device-to-host"
    TO_DEVICE = "host-to-device"
    OTHER = "on the device"


@dataclass(frozen=True, slots=True)
class Range:
    """A named range of host code."""

    name: str
    start: int
    end: int
    thread: int | None


@dataclass(frozen=True, slots=True)
class Count:
    """The value of a counter from `time` on."""

    name: str
    time: int
    value: int


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the CUDA API on the host."""

    name: str
    start: int
    end: int
    process: int
    thread: int | None
    correlation: int | None  # what it started on the device has the same

    @property
    def duration(self) -> int:
        """Nanoseconds on the host."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Activity:
    """A kernel, copy or memset on the device; with a `node`, of a replayed graph."""

    kind: Kind
    name: str
    start: int
    end: int
    process: int
    correlation: int | None
    node: int | None = None
    way: Way | None = None  # of a copy
    num_bytes: int = 0
    pageable: bool = False  # the host's side of a copy

    @property
    def duration(self) -> int:
        """Nanoseconds on the device."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class GraphRun:
    """One launch of a graph that was recorded as a whole."""

    start: int
    end: int
    process: int
    correlation: int | None
    graph: int


@dataclass(frozen=True, slots=True)
class Creation:
    """A graph node came to be: captured, or as a clone of `original` by an instantiation."""

    time: int
    process: int
    thread: int | None
    node: int
    original: int | None


@dataclass(frozen=True, slots=True)
class Profile:
    """One recording. `notes` say what it lacks."""

    source: str  # what recorded it, in words
    ranges: Sequence[Range]
    counts: Sequence[Count]
    calls: Sequence[Call]
    activities: Sequence[Activity]
    runs: Sequence[GraphRun]
    creations: Sequence[Creation]
    notes: tuple[str, ...] = field(default=())
