"""Errors of capture and replay.

CaptureError
├── RefusedError      the program does something that a graph cannot hold; says where and what to do
└── GraphStateError   a graph was used in a state that does not allow it
"""

from __future__ import annotations

from .source import Place


class CaptureError(RuntimeError):
    """Base of every error of capture and replay."""


class RefusedError(CaptureError):
    """The program does something that a graph cannot hold.

    `operation` is the torch operation, `place` the caller's line, `reason` why a graph cannot
    hold it and `fix` what to write instead.
    """

    def __init__(self, operation: str, place: Place, reason: str, fix: str) -> None:
        self.operation = operation
        self.place = place
        self.reason = reason
        self.fix = fix
        super().__init__(f"{operation} {reason}\n  at {place}\n  fix: {fix}")


class GraphStateError(CaptureError):
    """A method was called in a state of the graph that does not allow it."""
