"""Host policy: which rows run in the next step. It works from upper bounds, never device values.

First come, first served. Every running request that can still emit decodes in every step; prompts
are prefilled in chunks from the token places that are left. A request is admitted when a slot, the
pages of its longest possible length and a place in the prompt ring are free.

A running request passes through
    prefill (prefilled < prompt length, exact on the host)  ->  decode  ->  finished
and leaves its slot when its end was read from the output ring, or when it is cancelled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from graphattn.bounds import Bounds
from graphattn.errors import QueueFullError, wrong
from graphattn.inputs import Admission, Sampling, StepInputs
from graphattn.pages import PageAllocator
from graphattn.request import Event, FinishReason, Request
from graphattn.ring import RowResult, StepResult
from graphattn.state import Finish

_REASONS = {
    Finish.STOP: FinishReason.STOP,
    Finish.LENGTH: FinishReason.LENGTH,
    Finish.ERROR: FinishReason.ERROR,
}


@dataclass(eq=False, slots=True)
class _Seat:
    """A request in its slot, as far as the host knows it."""

    request: Request
    slot: int
    generation: int
    prefilled: int = 0  # prompt tokens of launched steps
    unread: int = 0  # launched, unread steps in which it emits

    @property
    def prefilling(self) -> bool:
        return self.prefilled < len(self.request.prompt)

    @property
    def known_len(self) -> int:
        """Tokens that the host has seen: prompt and emitted."""
        return len(self.request.prompt) + len(self.request.token_ids)

    @property
    def may_emit(self) -> bool:
        """Each unread step emits at least one token, so enough of them end the request."""
        return self.known_len + self.unread < self.request.stop_len

    def prefill_bound(self, bounds: Bounds) -> int:
        """Tokens whose KV the cache holds after the chunk that was planned last.

        The chunk that ends the prompt is drafted from: a drafter writes `max_drafts` beyond it.
        """
        beyond = 0 if self.prefilling else bounds.max_drafts
        return min(self.prefilled + beyond, bounds.max_kv_len(self.request.stop_len))

    def kv_bound(self, bounds: Bounds) -> int:
        """Most tokens whose KV the cache can hold after one more decode step.

        Tight when nothing is unread and there are no drafts.
        """
        q, k = bounds.decode_query_len, bounds.max_drafts
        longest = self.known_len - 1 + (self.unread + 1) * q + k
        return min(longest, bounds.max_kv_len(self.request.stop_len))


class Scheduler:
    """Slots, pages and queue of one engine."""

    def __init__(
        self, bounds: Bounds, *, max_queue: int, prompts_fit: Callable[[list[int]], bool]
    ) -> None:
        self._bounds = bounds
        self._max_queue = max_queue
        self._prompts_fit = prompts_fit
        self.pages = PageAllocator(bounds)
        self._queue: deque[Request] = deque()
        self._free_slots = list(range(bounds.max_batch - 1, -1, -1))
        self._seats: dict[int, _Seat] = {}  # by slot, in order of admission
        self._releases: list[int] = []  # slots to release on the device in the next step
        self._generation = 0
        self.drafted = [0] * bounds.max_drafts  # by place: how often there was a draft
        self.accepted = [0] * bounds.max_drafts  # and how often it was emitted

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Requests in a slot."""
        return len(self._seats)

    @property
    def idle(self) -> bool:
        """No request is waiting or running."""
        return not self._queue and not self._seats

    def submit(self, request: Request) -> None:
        """Queue a request; `QueueFullError` at the bound."""
        if len(self._queue) >= self._max_queue:
            raise QueueFullError(
                f"the queue holds {len(self._queue)} requests, its bound. "
                "Step and poll until some are admitted, or capture with a larger max_queue."
            )
        self._queue.append(request)

    def cancel(self, request: Request) -> Event | None:
        """End a request now; None when it had ended already.

        Raises `ConfigError` for a request of another engine.
        """
        if request.finished:
            return None
        if request in self._queue:
            self._queue.remove(request)
        else:
            seat = next((s for s in self._seats.values() if s.request is request), None)
            if seat is None:
                raise wrong(
                    "request", "a request of this engine", request, "Keep what submit gave."
                )
            self._vacate(seat)
        request.finish_reason = FinishReason.CANCELLED
        return Event(request, (), (), True, FinishReason.CANCELLED)

    def requests(self) -> list[Request]:
        """Every request that has not ended, running ones first."""
        return [s.request for s in self._seats.values()] + list(self._queue)

    @property
    def decoding(self) -> int:
        """Rows that decode in the next step."""
        return sum(not s.prefilling and s.may_emit for s in self._seats.values())

    def plan(self, max_tokens: int, *, mixed: bool = True) -> StepInputs:
        """The next step, as if it had been launched, of at most `max_tokens` places; prefill rows
        only if `mixed`. It has no rows when nothing can be done."""
        inputs = StepInputs()
        self._decode(inputs)
        if mixed:
            places = self._prefill(inputs, max_tokens - inputs.tokens)
            self._admit(inputs, places)
        assert len(inputs.page_updates) <= self._bounds.max_page_updates
        inputs.releases, self._releases = self._releases, []
        return inputs

    def read(self, result: StepResult) -> list[Event]:
        """Take in a landed step: what its requests emitted, and which ended."""
        events = (self._read_row(row) for row in result.rows)
        return [event for event in events if event is not None]

    def _decode(self, inputs: StepInputs) -> None:
        for seat in self._seats.values():
            if seat.prefilling or not seat.may_emit:
                continue
            inputs.page_updates += self.pages.grow(seat.slot, seat.kv_bound(self._bounds))
            inputs.rows.append((seat.slot, self._bounds.decode_query_len))
            seat.unread += 1

    def _prefill(self, inputs: StepInputs, places: int) -> int:
        for seat in self._seats.values():
            if places and seat.prefilling:
                places -= self._chunk(seat, inputs, places)
        return places

    def _admit(self, inputs: StepInputs, places: int) -> None:
        while places and self._queue and self._free_slots:
            request = self._queue[0]
            prompts = [len(a.tokens) for a in inputs.admissions] + [len(request.prompt)]
            if not self.pages.fits(self._most_kv(request)) or not self._prompts_fit(prompts):
                return
            self._queue.popleft()
            seat = self._seat(request)
            inputs.admissions.append(
                Admission(
                    slot=seat.slot,
                    generation=seat.generation,
                    tokens=request.prompt,
                    given_len=len(request.prompt),
                    context_len=0,
                    stop_len=request.stop_len,
                    stop_tokens=request.stop_tokens,
                    sampling=_sampling(request),
                )
            )
            places -= self._chunk(seat, inputs, places)

    def _seat(self, request: Request) -> _Seat:
        slot = self._free_slots.pop()
        seat = _Seat(request, slot, self._generation)
        self._generation = (self._generation + 1) & 0x7FFFFFFF
        self._seats[slot] = seat
        self.pages.reserve(slot, self._most_kv(request))
        return seat

    def _most_kv(self, request: Request) -> int:
        return self._bounds.max_kv_len(request.stop_len)

    def _chunk(self, seat: _Seat, inputs: StepInputs, places: int) -> int:
        """Plan the next chunk of a prompt; returns the places it takes."""
        count = min(len(seat.request.prompt) - seat.prefilled, places)
        seat.prefilled += count
        inputs.page_updates += self.pages.grow(seat.slot, seat.prefill_bound(self._bounds))
        inputs.rows.append((seat.slot, count))
        inputs.mixed = True
        if not seat.prefilling:
            seat.unread += 1
        return count

    def _read_row(self, row: RowResult) -> Event | None:
        seat = self._seats.get(row.slot)
        if seat is None or seat.generation != row.generation:
            return None  # a late result of an earlier use of the slot
        finish = Finish(row.finish)
        if not row.token_ids and finish is Finish.RUNNING:
            return None  # a chunk that does not end its prompt
        request = seat.request
        seat.unread -= 1
        request.token_ids += row.token_ids
        request.logprobs += row.logprobs
        self._count_drafts(request, row)
        if finish is Finish.RUNNING:
            return Event(request, row.token_ids, row.logprobs)
        self._vacate(seat)
        request.finish_reason = _REASONS[finish]
        if finish is Finish.ERROR:
            request.error = (
                f"the model's logits held a NaN after {seat.known_len} tokens; "
                "the request was ended, others are unharmed"
            )
        return Event(
            request, row.token_ids, row.logprobs, True, request.finish_reason, request.error
        )

    def _count_drafts(self, request: Request, row: RowResult) -> None:
        accepted = max(0, len(row.token_ids) - 1)
        request.drafted += row.drafted
        request.accepted += accepted
        for place in range(row.drafted):
            self.drafted[place] += 1
            self.accepted[place] += place < accepted

    def _vacate(self, seat: _Seat) -> None:
        del self._seats[seat.slot]
        self.pages.release(seat.slot)
        self._free_slots.append(seat.slot)
        self._releases.append(seat.slot)


def _sampling(request: Request) -> Sampling:
    params = request.params
    return Sampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=request.seed,
    )
