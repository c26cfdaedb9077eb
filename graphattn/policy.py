"""First come, first served: the plan of a step unless somebody else makes one.

Every running request that can still emit decodes in every step; prompts are prefilled in chunks
from the token places that are left, so that decoding is never starved by prefill. When pages run
out, the request that came last is preempted: it waits again, first of all, and goes on with the
same tokens. A request whose results are on their way waits for them instead, since they tighten
what it may need. The request that came first is never preempted, so everything ends.
"""

from __future__ import annotations

from graphattn.plan import Plan
from graphattn.request import Request
from graphattn.scheduler import Scheduler
from graphattn.seat import Seat


def first_come(scheduler: Scheduler, max_tokens: int, *, mixed: bool) -> Plan:
    """A plan of at most `max_tokens` token places, with prefill rows only if `mixed`."""
    seats, pages = scheduler.seats, scheduler.pages.available
    decode, victims, pages = _decode(scheduler, seats, pages)
    if not mixed:
        return Plan(decode, preempt=victims)
    places = max_tokens - len(decode) * scheduler.bounds.decode_query_len
    prefill: list[tuple[Request, int]] = []
    for seat in [seat for seat in seats if seat.prefilling]:
        if places and seat.request not in victims:
            prefill.append((seat.request, min(seat.left, places)))
            places -= prefill[-1][1]
    if not victims:
        prefill += _admit(scheduler, places, pages - len(decode))
    return Plan(decode, tuple(prefill), victims)


def _decode(
    scheduler: Scheduler, seats: list[Seat], pages: int
) -> tuple[tuple[Request, ...], tuple[Request, ...], int]:
    """Who decodes, who is preempted for that, and the pages that are left."""
    decoding = [seat for seat in seats if seat.decodes]
    whole = sum(scheduler.decode_pages(decoding))
    if whole <= pages:
        return tuple([seat.request for seat in decoding]), (), pages - whole
    last, decode, victims = len(seats), [], []
    for index, seat in enumerate(seats):
        if index >= last:
            break  # it and all later ones are preempted
        if not seat.decodes:
            continue
        (needed,) = scheduler.decode_pages([seat])
        if needed > pages and seat.unread:
            continue
        while needed > pages and index < last:
            last -= 1
            victims.append(seats[last].request)
            pages += scheduler.pages.yields(seats[last].slot)
        if index < last:
            pages -= needed
            decode.append(seat.request)
    return tuple(decode), tuple(victims), pages


def _admit(scheduler: Scheduler, places: int, pages: int) -> list[tuple[Request, int]]:
    """Who is seated, in the order of the queue; `pages` leave one to each row that decodes."""
    admitted: list[tuple[Request, int]] = []
    lengths: list[int] = []
    columns = 0
    for request in scheduler.queue:
        if not places or len(admitted) == len(scheduler.free_slots):
            break
        prefix = scheduler.prefix(request)
        lengths.append(request.known_len)
        columns += scheduler.admission_columns(request)
        pages -= scheduler.admission_pages(request, prefix)
        fits = pages >= 0 and columns <= scheduler.bounds.max_admission_updates
        if not fits or not scheduler.prompts_fit(lengths):
            break
        admitted.append((request, min(request.known_len - prefix.length, places)))
        places -= admitted[-1][1]
    return admitted
