"""A request in its slot, as far as the host knows it, and what it can have become since.

A seat passes through
    prefill (prefilled < its tokens, exact on the host)  ->  decode  ->  left
and is left when its end was read from the output ring, when it is cancelled, or preempted.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphattn.bounds import Bounds, local_length
from graphattn.inputs import Admission, Sampling
from graphattn.request import Request


@dataclass(eq=False, slots=True)
class Seat:
    """One use of a slot."""

    request: Request
    slot: int
    generation: int
    tokens: tuple[int, ...]  # known when it was admitted: the prompt, and what it had emitted
    prefilled: int  # of them, those of launched steps or of a prefix found
    landed: int  # context length after the last step that was read
    known_len: int  # tokens that the host has seen: prompt and emitted
    kv_limit: int  # most tokens whose KV is ever written
    unread: int = 0  # launched, unread steps in which it emits
    room: int = 0  # tokens that its pages hold
    unit_end: float = 0.0  # tokens at which its next unit can be shared

    @property
    def left(self) -> int:
        """Tokens still to be prefilled."""
        return len(self.tokens) - self.prefilled

    @property
    def prefilling(self) -> bool:
        """Whether some are left."""
        return self.prefilled < len(self.tokens)

    @property
    def decodes(self) -> bool:
        """Whether it has a decode row in the next step.

        Each unread step emits at least one token, so enough of them end the request.
        """
        return (
            self.prefilled == len(self.tokens)
            and self.known_len + self.unread < self.request.stop_len
        )

    @property
    def written(self) -> int:
        """Tokens whose KV launched steps have written for good: of these, all are known."""
        return self.prefilled if self.known_len == len(self.tokens) else self.known_len - 1

    def kv_bound(self, max_drafts: int) -> int:
        """Most tokens whose KV the cache can hold after one more decode step.

        Tight when nothing is unread and there are no drafts.
        """
        longest = self.known_len + self.unread * (1 + max_drafts) + 2 * max_drafts
        return longest if longest < self.kv_limit else self.kv_limit

    def columns_behind(self, window: int, bounds: Bounds) -> int:
        """Page-table columns that no step in flight or to come reads through `window` > 0.

        The first query of any step that has not landed is at position `landed`; the highest rank
        has the shortest shard.
        """
        first = max(0, self.landed + 1 - window)
        shard = local_length(first, bounds.dcp_size - 1, bounds.dcp_size, bounds.interleave)
        return shard // bounds.page_size

    def admission(self) -> Admission:
        """What the device is told when the request takes the slot."""
        return Admission(
            slot=self.slot,
            generation=self.generation,
            tokens=self.tokens,
            given_len=len(self.request.prompt),
            context_len=self.prefilled,
            stop_len=self.request.stop_len,
            stop_tokens=self.request.stop_tokens,
            sampling=_sampling(self.request),
        )


def admitted_kv(num_tokens: int, stop_len: int, bounds: Bounds) -> int:
    """Most tokens whose KV is written until a prompt of `num_tokens` is prefilled.

    The chunk that ends it is drafted from: a drafter writes `max_drafts` beyond it.
    """
    return min(num_tokens + bounds.max_drafts, bounds.max_kv_len(stop_len))


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
