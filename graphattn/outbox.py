"""News of requests that the caller has not polled yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from graphattn.errors import QueueFullError
from graphattn.request import Event, Request


class Outbox:
    """Events in order. Those of running requests are bounded by the slots; ended requests that
    nobody polls are bounded by `max_ended`: beyond it no request is taken."""

    def __init__(self, max_ended: int) -> None:
        self.emitted = self.ended = 0  # tokens and requests, since the beginning
        self._max_ended = max_ended
        self._events: deque[Event] = deque()
        self._ended_here = 0

    def __len__(self) -> int:
        return len(self._events)

    def put(self, *events: Event) -> None:
        """Add the latest events."""
        self._events += events
        self.emitted += sum([len(event.token_ids) for event in events])
        ended = sum([event.finished for event in events])
        self.ended += ended
        self._ended_here += ended

    def take(self) -> list[Event]:
        """Hand out all events."""
        events = list(self._events)
        self._events.clear()
        self._ended_here = 0
        return events

    def discard(self, requests: Collection[Request]) -> None:
        """Drop the events of `requests`: their caller has them otherwise."""
        own = set(requests)
        self._events = deque(e for e in self._events if e.request not in own)
        self._ended_here = sum(e.finished for e in self._events)

    def check_polled(self) -> None:
        """`QueueFullError` when too many ended requests wait to be polled."""
        if self._ended_here >= self._max_ended:
            raise QueueFullError(
                f"{self._ended_here} requests have ended and were not polled, the bound. "
                "Call poll(), which hands out their events, or capture with a larger max_queue."
            )
