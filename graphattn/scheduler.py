"""Slots, pages and queue of one engine, and how plans become step inputs.

It works from upper bounds, never from device values. Results of a slot's earlier use are told by
its generation and dropped: what a preempted request had in flight is computed again, to the same
tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from graphattn.bounds import Bounds
from graphattn.errors import QueueFullError, wrong
from graphattn.inputs import StepInputs
from graphattn.pages import PageAllocator, Prefix
from graphattn.plan import Plan, Work
from graphattn.request import Event, FinishReason, Request
from graphattn.ring import RowResult, StepResult
from graphattn.seat import Seat, admitted_kv
from graphattn.state import Finish

_REASONS = {
    Finish.STOP: FinishReason.STOP,
    Finish.LENGTH: FinishReason.LENGTH,
    Finish.ERROR: FinishReason.ERROR,
}


class Scheduler:
    """`window`: the widest of the layers' windows, 0 when some layer sees everything."""

    def __init__(
        self,
        bounds: Bounds,
        *,
        max_queue: int,
        window: int,
        lookahead: int | None,
        prompts_fit: Callable[[list[int]], bool],
    ) -> None:
        self.bounds = bounds
        self.prompts_fit = prompts_fit
        self.pages = PageAllocator(bounds, lookahead=lookahead)
        self.queue: deque[Request] = deque()  # without a slot; preempted ones come first
        self.free_slots = list(range(bounds.max_batch - 1, -1, -1))
        self.preemptions = self.reused = 0  # requests, and tokens of their prefixes found
        self.drafted = [0] * bounds.max_drafts  # by place: how often there was a draft
        self.accepted = [0] * bounds.max_drafts  # and how often it was emitted
        self._max_queue = max_queue
        self._window = window
        self._seats: dict[int, Seat] = {}  # by slot
        self._seat_of: dict[Request, Seat] = {}
        self._releases: list[int] = []  # slots to release on the device in the next step
        self._generation = 0

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return len(self.queue)

    @property
    def running(self) -> int:
        """Requests in a slot."""
        return len(self._seats)

    @property
    def idle(self) -> bool:
        """No request is waiting or running."""
        return not self.queue and not self._seats

    @property
    def seats(self) -> list[Seat]:
        """Of the running requests, first come first."""
        return sorted(self._seats.values(), key=lambda seat: seat.request.id)

    @property
    def decoding(self) -> int:
        """Rows that can decode in the next step."""
        return sum(seat.decodes for seat in self._seats.values())

    def requests(self) -> list[Request]:
        """Every request that has not ended, running ones first."""
        return [seat.request for seat in self.seats] + list(self.queue)

    def submit(self, request: Request) -> None:
        """Queue a request; `QueueFullError` at the bound."""
        if len(self.queue) >= self._max_queue:
            raise QueueFullError(
                f"the queue holds {len(self.queue)} requests, its bound. "
                "Step and poll until some are admitted, or capture with a larger max_queue."
            )
        self.queue.append(request)

    def cancel(self, request: Request) -> Event | None:
        """End a request now; None when it had ended already.

        Raises `ConfigError` for a request of another engine.
        """
        if request.finished:
            return None
        if request in self._seat_of:
            self._vacate(self._seat_of[request])
        elif request in self.queue:
            self.queue.remove(request)
        else:
            raise wrong("request", "a request of this engine", request, "Keep what submit gave.")
        request.finish_reason = FinishReason.CANCELLED
        return Event(request, (), (), True, FinishReason.CANCELLED)

    def prefix(self, request: Request) -> Prefix:
        """What a waiting request would find of its tokens."""
        return self.pages.find(request.known_tokens)

    def admission_pages(self, request: Request, prefix: Prefix) -> int:
        """Pages that admitting `request` takes from those available."""
        return self.pages.price(prefix, self._admitted_kv(request))

    def admission_columns(self, request: Request) -> int:
        """Page-table updates of admitting `request`."""
        return self.bounds.pages_for(self._admitted_kv(request))

    def decode_pages(self, seat: Seat) -> int:
        """Pages that the next decode row of `seat` takes from those available."""
        return self.pages.missing(seat.slot, seat.kv_bound(self.bounds))

    def work(self) -> list[Work]:
        """Every request that has not ended, for a policy of somebody else."""
        running = [
            Work(
                seat.request,
                seated=True,
                left=seat.left,
                decodes=seat.decodes,
                unread=seat.unread,
                pages=self.decode_pages(seat) if seat.decodes else 0,
                yields=self.pages.yields(seat.slot),
            )
            for seat in self.seats
        ]
        return running + [self._waiting_work(request) for request in self.queue]

    def apply(self, plan: Plan, *, idle: bool = False) -> StepInputs:
        """The inputs of a step that does what `plan` says, as if it had been launched; one without
        rows is launched only if `idle`.

        The plan is feasible: made by `first_come`, or checked by `check`.
        """
        inputs = StepInputs()
        for request in plan.preempt:
            self._preempt(self._seat_of[request])
        for request in plan.decode:
            self._decode(self._seat_of[request], inputs)
        for request, count in plan.prefill:
            seat = self._seat_of.get(request) or self._admit(request, inputs)
            self._chunk(seat, count, inputs)
        assert len(inputs.page_updates) <= self.bounds.max_page_updates
        if inputs.rows or idle:
            inputs.releases, self._releases = self._releases, []
        return inputs

    def check(self, plan: Plan, max_tokens: int) -> None:
        """Raise `ConfigError`, and change nothing, for a plan that cannot be launched."""
        named = [*plan.decode, *(request for request, _ in plan.prefill), *plan.preempt]
        if len(set(named)) < len(named):
            raise wrong("plan", "each request once", "one of them twice", "Plan one thing each.")
        work = {w.request: w for w in self.work()}
        for request in plan.preempt:
            if request not in self._seat_of:
                raise wrong("plan.preempt", "requests in a slot", request, "See Work.seated.")
        for request in plan.decode:
            if request not in work or not work[request].decodes:
                raise wrong("plan.decode", "requests that can decode", request, "See Work.decodes.")
        for request, count in plan.prefill:
            left = work[request].left if request in work else 0
            if not left:
                raise wrong(
                    "plan.prefill", "requests with a prompt left", request, "See Work.left."
                )
            if not isinstance(count, int) or not 1 <= count <= left:
                raise wrong(
                    "plan.prefill", f"chunks of 1 to {left} tokens", count, "See Work.left."
                )
        tokens = len(plan.decode) * self.bounds.decode_query_len + sum(c for _, c in plan.prefill)
        if tokens > max_tokens:
            raise wrong("plan", f"at most {max_tokens} token places", tokens, "Shorten the chunks.")
        self._check_room(plan, work)

    def preempt_all(self) -> None:
        """Every running request leaves its slot and waits, first come first."""
        for seat in reversed(self.seats):
            self._preempt(seat)

    def read(self, result: StepResult) -> list[Event]:
        """Take in a landed step: what its requests emitted, and which ended."""
        events = (self._read_row(row) for row in result.rows)
        return [event for event in events if event is not None]

    def _waiting_work(self, request: Request) -> Work:
        prefix = self.prefix(request)
        return Work(
            request,
            seated=False,
            left=request.known_len - prefix.length,
            decodes=False,
            unread=0,
            pages=self.admission_pages(request, prefix),
            yields=0,
        )

    def _check_room(self, plan: Plan, work: Mapping[Request, Work]) -> None:
        new = [work[request] for request, _ in plan.prefill if not work[request].seated]
        slots = len(self.free_slots) + len(plan.preempt)
        if len(new) > slots:
            raise wrong("plan.prefill", f"at most {slots} new requests", len(new), "Let some wait.")
        needed = sum(w.pages for w in new) + sum(work[r].pages for r in plan.decode)
        pages = self.pages.available + sum(work[r].yields for r in plan.preempt)
        if needed > pages:
            raise wrong("plan", f"at most {pages} pages", needed, "Preempt requests, or wait.")
        columns = sum(self.admission_columns(w.request) for w in new)
        most = self.bounds.max_admission_updates
        if columns > most:
            raise wrong(
                "plan.prefill",
                f"new requests of at most {most} pages",
                columns,
                "Admit fewer in one step.",
            )
        if not self.prompts_fit([w.request.known_len for w in new]):
            raise wrong(
                "plan.prefill", "prompts that fit the ring", "more", "Admit fewer in one step."
            )

    def _admitted_kv(self, request: Request) -> int:
        return admitted_kv(request.known_len, request.stop_len, self.bounds)

    def _decode(self, seat: Seat, inputs: StepInputs) -> None:
        self._trim(seat)
        inputs.page_updates += self.pages.grow(seat.slot, seat.kv_bound(self.bounds))
        inputs.rows.append((seat.slot, self.bounds.decode_query_len))
        seat.unread += 1

    def _admit(self, request: Request, inputs: StepInputs) -> Seat:
        """Seat a request with the pages of everything that is to be prefilled."""
        prefix = self.prefix(request)
        self.queue.remove(request)
        slot = self.free_slots.pop()
        seat = Seat(
            request,
            slot,
            self._generation,
            tokens=request.known_tokens,
            prefilled=prefix.length,
            landed=prefix.length,
        )
        self._generation = (self._generation + 1) & 0x7FFFFFFF
        self._seats[slot] = self._seat_of[request] = seat
        inputs.page_updates += self.pages.open(slot, prefix)
        inputs.page_updates += self.pages.grow(slot, self._admitted_kv(request))
        inputs.admissions.append(seat.admission())
        self.reused += prefix.length
        return seat

    def _chunk(self, seat: Seat, count: int, inputs: StepInputs) -> None:
        self._trim(seat)
        count = min(count, seat.left)  # more of it was found than when it was planned
        seat.prefilled += count
        inputs.rows.append((seat.slot, count))
        inputs.mixed = True
        if not seat.prefilling:
            seat.unread += 1
        self._publish(seat)

    def _trim(self, seat: Seat) -> None:
        if self._window and (columns := seat.columns_behind(self._window, self.bounds)):
            self.pages.trim(seat.slot, columns)

    def _publish(self, seat: Seat) -> None:
        if self.pages.completes(seat.slot, seat.written, seat.known_len):
            self.pages.publish(seat.slot, seat.request.known_tokens, seat.written)

    def _preempt(self, seat: Seat) -> None:
        self._vacate(seat)
        self.queue.appendleft(seat.request)
        seat.request.preemptions += 1
        self.preemptions += 1

    def _read_row(self, row: RowResult) -> Event | None:
        seat = self._seats.get(row.slot)
        if seat is None or seat.generation != row.generation:
            return None  # a late result of an earlier use of the slot
        seat.landed = row.context_len
        finish = Finish(row.finish)
        if not row.token_ids and finish is Finish.RUNNING:
            return None  # a chunk that does not end its prompt
        request = seat.request
        seat.unread -= 1
        request.token_ids += row.token_ids
        request.logprobs += row.logprobs
        self._count_drafts(request, row)
        if finish is Finish.RUNNING:
            self._publish(seat)
            return Event(request, row.token_ids, row.logprobs)
        if finish is Finish.ERROR:
            self.pages.retract(seat.slot)
            request.error = (
                f"the model's logits held a NaN after {seat.known_len} tokens; "
                "the request was ended, others are unharmed"
            )
        else:
            self._publish(seat)
        self._vacate(seat)
        request.finish_reason = _REASONS[finish]
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

    def _vacate(self, seat: Seat) -> None:
        del self._seats[seat.slot], self._seat_of[seat.request]
        self.pages.release(seat.slot)
        self.free_slots.append(seat.slot)
        self._releases.append(seat.slot)
