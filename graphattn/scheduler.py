"""Slots, pages and queue of one engine, and how plans become step inputs.

It works from upper bounds, never from device values. Results of a slot's earlier use are told by
its generation and dropped: what a preempted request had in flight is computed again, to the same
tokens.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping

from graphattn._capture import nvtx_ranges
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
        self._max_queue = max_queue
        self._window = window
        self._query_len = bounds.decode_query_len
        self._places = range(bounds.max_drafts)
        self._seats: dict[int, Seat] = {}  # by slot
        self._in_order: list[Seat] = []  # first come first
        self._seat_of: dict[Request, Seat] = {}
        self._releases: list[int] = []  # slots to release on the device in the next step
        self._generation = 0
        self._verified: Counter[tuple[int, int]] = Counter()  # rows by (drafts, accepted)

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
        return self._in_order.copy()

    @property
    def decoding(self) -> int:
        """Rows that can decode in the next step."""
        return sum(seat.decodes for seat in self._seats.values())

    @property
    def drafted(self) -> list[int]:
        """[k] how often there was a first, second, ... draft."""
        rows = self._verified.items()
        return [sum(n for (drafts, _), n in rows if drafts > i) for i in self._places]

    @property
    def accepted(self) -> list[int]:
        """[k] how often the first, second, ... draft was emitted."""
        rows = self._verified.items()
        return [sum(n for (_, right), n in rows if right > i) for i in self._places]

    def requests(self) -> list[Request]:
        """Every request that has not ended, running ones first."""
        return list(dict.fromkeys([*(seat.request for seat in self._in_order), *self.queue]))

    def drop(self) -> list[Request]:
        """Forget every request, also when a call was broken off half way; which they were.

        One whose end was read, but not told, is among them.
        """
        requests = self.requests()
        for seat in self._in_order:
            if self.pages.pages_of(seat.slot):
                self.pages.release(seat.slot)
        self._in_order.clear()
        self._seats.clear()
        self._seat_of.clear()
        self.queue.clear()
        return requests

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
        seat = self._seat_of.get(request)
        if seat is None and request not in self.queue:
            raise wrong("request", "a request of this engine", request, "Keep what submit gave.")
        request.finish_reason = FinishReason.CANCELLED
        if seat is None:
            self.queue.remove(request)
        else:
            self._vacate(seat)
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

    def decode_pages(self, seats: Iterable[Seat]) -> list[int]:
        """Pages that the next decode row of each seat takes from those available."""
        k, missing = self.bounds.max_drafts, self.pages.missing
        return [
            missing(seat.slot, bound) if (bound := seat.kv_bound(k)) > seat.room else 0
            for seat in seats
        ]

    def work(self) -> list[Work]:
        """Every request that has not ended, for a policy of somebody else."""
        running = [
            Work(
                seat.request,
                seated=True,
                left=seat.left,
                decodes=seat.decodes,
                unread=seat.unread,
                pages=sum(self.decode_pages([seat])) if seat.decodes else 0,
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
            nvtx_ranges.count("pages_taken", self.pages.taken)
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
        events = []
        for row in result.rows:
            seat = self._seats.get(row.slot)
            if seat is None or seat.generation != row.generation:
                continue  # padding, or a late result of an earlier use of the slot
            seat.landed = row.context_len
            if row.emitted or row.finish:  # otherwise a chunk that does not end its prompt
                events.append(self._read_row(seat, row))
        if nvtx_ranges.enabled():
            emitted = [len(event.token_ids) for event in events]
            nvtx_ranges.count("emitted_tokens", sum(emitted))
            nvtx_ranges.count("accepted_tokens", sum(count - 1 for count in emitted if count))
        return events

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
        if self._window:
            self._trim(seat)
        bound = seat.kv_bound(self.bounds.max_drafts)
        if bound > seat.room:
            self._grow(seat, bound, inputs)
        inputs.rows.append((seat.slot, self._query_len))
        seat.unread += 1

    def _grow(self, seat: Seat, num_tokens: int, inputs: StepInputs) -> None:
        inputs.page_updates += self.pages.grow(seat.slot, num_tokens)
        seat.room = self.pages.room(seat.slot)

    def _admit(self, request: Request, inputs: StepInputs) -> Seat:
        """Seat a request with the pages of everything that is to be prefilled."""
        prefix = self.prefix(request)
        slot = self.free_slots.pop()
        seat = Seat(
            request,
            slot,
            self._generation,
            tokens=request.known_tokens,
            prefilled=prefix.length,
            landed=prefix.length,
            known_len=request.known_len,
            kv_limit=self.bounds.max_kv_len(request.stop_len),
        )
        self._generation = (self._generation + 1) & 0x7FFFFFFF
        self._seats[slot] = self._seat_of[request] = seat
        insort(self._in_order, seat, key=lambda seat: seat.request.id)
        self.queue.remove(request)  # after it has its seat: a request is never nowhere
        inputs.page_updates += self.pages.open(slot, prefix)
        self._grow(seat, self._admitted_kv(request), inputs)
        inputs.admissions.append(seat.admission())
        self.reused += prefix.length
        return seat

    def _chunk(self, seat: Seat, count: int, inputs: StepInputs) -> None:
        if self._window:
            self._trim(seat)
        count = min(count, seat.left)  # more of it was found than when it was planned
        seat.prefilled += count
        inputs.rows.append((seat.slot, count))
        inputs.mixed = True
        if not seat.prefilling:
            seat.unread += 1
        self._publish(seat)

    def _trim(self, seat: Seat) -> None:
        if columns := seat.columns_behind(self._window, self.bounds):
            self.pages.trim(seat.slot, columns)

    def _publish(self, seat: Seat) -> None:
        if self.pages.completes(seat.slot, seat.written, seat.known_len):
            self.pages.publish(seat.slot, seat.request.known_tokens, seat.written)
        seat.unit_end = self.pages.unit_end(seat.slot)

    def _preempt(self, seat: Seat) -> None:
        self.queue.appendleft(seat.request)  # before it leaves its seat: it is never nowhere
        self._vacate(seat)
        seat.request.preemptions += 1
        self.preemptions += 1

    def _read_row(self, seat: Seat, row: RowResult) -> Event:
        request, count = seat.request, row.emitted
        tokens, logprobs = tuple(row.tokens[:count]), tuple(row.logprobs[:count])
        seat.unread -= 1
        seat.known_len += count
        request.token_ids += tokens
        request.logprobs += logprobs
        if row.logits_count > 1:
            self._count_drafts(request, row)
        if row.finish:
            return self._end(seat, Finish(row.finish), tokens, logprobs)
        if seat.known_len > seat.unit_end:
            self._publish(seat)
        return Event(request, tokens, logprobs)

    def _end(
        self, seat: Seat, finish: Finish, tokens: tuple[int, ...], logprobs: tuple[float, ...]
    ) -> Event:
        """Its last tokens have landed."""
        request = seat.request
        if finish is Finish.ERROR:
            self.pages.retract(seat.slot)
            request.error = (
                f"the model's logits held a NaN after {seat.known_len} tokens; "
                "the request was ended, others are unharmed"
            )
        else:
            self._publish(seat)
        request.finish_reason = _REASONS[finish]
        self._vacate(seat)
        return Event(request, tokens, logprobs, True, request.finish_reason, request.error)

    def _count_drafts(self, request: Request, row: RowResult) -> None:
        drafted, accepted = row.logits_count - 1, max(0, row.emitted - 1)
        request.drafted += drafted
        request.accepted += accepted
        self._verified[drafted, accepted] += 1

    def _vacate(self, seat: Seat) -> None:
        del self._seats[seat.slot], self._seat_of[seat.request]
        self.pages.release(seat.slot)
        self.free_slots.append(seat.slot)
        self._releases.append(seat.slot)
        self._in_order.remove(seat)
