"""What a step is to do, in requests: what a scheduling policy decides, ours or a user's."""

from __future__ import annotations

from dataclasses import dataclass

from graphattn.request import Request


@dataclass(frozen=True, slots=True)
class Plan:
    """One step.

    `decode`   requests that decode: each takes 1 + drafts token places
    `prefill`  (request, tokens of its next chunk): one that waits is admitted to a slot
    `preempt`  requests that leave their slot before all of this; they wait again, first of all,
               and go on later with the same tokens

    A request is in one of the three. A row's kind follows the state of its request, never its
    length: a chunk of one token is prefill.
    """

    decode: tuple[Request, ...] = ()
    prefill: tuple[tuple[Request, int], ...] = ()
    preempt: tuple[Request, ...] = ()


@dataclass(frozen=True, slots=True)
class Work:
    """A request that has not ended, as a policy sees it."""

    request: Request
    seated: bool  # it has a slot
    left: int  # tokens to prefill before it decodes; of one without a slot, those not found
    decodes: bool  # it may have a decode row in the next step
    unread: int  # steps in flight in which it emits
    pages: int  # that its next decode row, or its admission, takes from those available
    yields: int  # pages that become available when it is preempted
