"""Upper bounds and context-parallel arithmetic: plain integers, no tensors.

Everything the runtime allocates is sized from a `Bounds`, so a captured step never
outgrows its buffers. The arithmetic distributes token positions over the ranks of a
Decode Context Parallel (DCP) group in blocks of `interleave` tokens, round robin.
One rank is the case `dcp_size=1` of the same formulas.

    p  global position of a token        W  dcp_size
    c  local position on its owner       r  dcp_rank
    L  number of tokens of a sequence    I  interleave

A query at global position p sees exactly the local positions `c < local_length(p + 1)`
of each rank, whatever the interleave: visibility under a causal mask is a prefix; a window of w
tokens starts at `local_length(max(0, p + 1 - w))`. Expand a row to its tokens first and localize
then: differences of local lengths are not local lengths.

The functions are exact for integers of any size, 0 <= r < W, I >= 1, p, c, L >= 0, and check
nothing: they are the arithmetic of hosts that plan a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from graphattn.errors import wrong

__all__ = [
    "Bounds",
    "KVPlace",
    "ceil_div",
    "global_position",
    "kv_place",
    "local_length",
    "local_position",
    "max_local_length",
    "owner",
    "prefix_unit",
    "tokens_in_shard",
]


def owner(p: int, W: int, I: int) -> int:
    """Rank that holds the KV entry of global position `p`."""
    return p // I % W


def local_position(p: int, W: int, I: int) -> int:
    """Index of global position `p` among the entries of its owner."""
    return p // (W * I) * I + p % I


def global_position(c: int, r: int, W: int, I: int) -> int:
    """Global position of entry `c` of rank `r`; inverse of `owner` and `local_position`."""
    return c // I * W * I + r * I + c % I


class KVPlace(NamedTuple):
    """Where the KV entry of a token lies."""

    rank: int  # that owns it
    column: int  # of the slot's page table on that rank
    offset: int  # in the page


def kv_place(p: int, W: int, I: int, page_size: int) -> KVPlace:
    """The layout contract: entry of global position `p`; the same for every layer and slot."""
    c = local_position(p, W, I)
    return KVPlace(owner(p, W, I), c // page_size, c % page_size)


def local_length(L: int, r: int, W: int, I: int) -> int:
    """Number of the first `L` tokens that rank `r` holds. Never larger on a higher rank."""
    return L // (W * I) * I + min(max(L % (W * I) - r * I, 0), I)


def max_local_length(L: int, W: int, I: int) -> int:
    """Longest shard of any sequence of at most `L` tokens: rank 0's, since it fills first."""
    return local_length(L, 0, W, I)


def tokens_in_shard(c: int, W: int, I: int) -> int:
    """Longest sequence of which no rank holds more than `c` entries: rank 0's limit."""
    return c // I * W * I + c % I


def prefix_unit(page_size: int, W: int, I: int) -> int:
    """Tokens in the smallest prefix that fills whole pages on every rank.

    Prefixes are shared between requests in multiples of it; anything smaller shares a page
    that some rank still writes.
    """
    return page_size if W == 1 else W * math.lcm(page_size, I)


def ceil_div(a: int, b: int) -> int:
    """Smallest integer >= a / b, for non-negative `a`."""
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Upper bounds of an engine, fixed at capture. Every buffer is sized from them.

    Raises `ConfigError` on construction when a bound is not a positive integer or two
    contradict each other.
    """

    max_batch: int  # slots, and row places of a step
    max_seq_len: int  # tokens of one request: prompt plus output
    max_tokens: int  # token places of the largest step
    page_size: int  # local KV positions of one page
    num_pages: int  # pages of the pool, on each rank
    vocab_size: int = 1  # of sampling, which counts tokens; attention has no use for it
    max_drafts: int = 0  # k: draft tokens per decode row
    max_stop_tokens: int = 8  # stop token ids per request
    dcp_size: int = 1
    dcp_rank: int = 0
    interleave: int = 1

    def __post_init__(self) -> None:
        for name in (
            "max_batch",
            "max_seq_len",
            "max_tokens",
            "page_size",
            "num_pages",
            "vocab_size",
            "max_stop_tokens",
            "dcp_size",
            "interleave",
        ):
            _check_int(name, getattr(self, name), at_least=1)
        _check_int("max_drafts", self.max_drafts, at_least=0)
        _check_int("dcp_rank", self.dcp_rank, at_least=0)
        if self.dcp_rank >= self.dcp_size:
            raise wrong("dcp_rank", f"0..{self.dcp_size - 1}", self.dcp_rank, "Ranks count from 0.")
        if self.max_tokens < self.decode_tokens:
            raise wrong(
                "max_tokens",
                f"at least max_batch * (1 + drafts) = {self.decode_tokens}",
                self.max_tokens,
                "Every slot must be able to decode in one step: raise max_tokens "
                "or lower max_batch.",
            )
        if self.num_pages < self.pages_per_seq:
            raise wrong(
                "num_pages",
                f"the {self.pages_per_seq} pages of one sequence of {self.max_seq_len} tokens",
                self.num_pages,
                "Raise num_pages or memory_budget, or lower max_seq_len.",
            )

    @property
    def decode_query_len(self) -> int:
        """Token places of a decode row: one committed token and its drafts."""
        return 1 + self.max_drafts

    @property
    def decode_tokens(self) -> int:
        """Token places when every slot decodes."""
        return self.max_batch * self.decode_query_len

    @property
    def pages_per_seq(self) -> int:
        """Page-table width: pages of the longest request on the rank with the longest shard."""
        return self.pages_for(self.max_seq_len)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that a sequence of `num_tokens` takes on rank 0; the ids serve all ranks."""
        return ceil_div(
            max_local_length(num_tokens, self.dcp_size, self.interleave), self.page_size
        )

    def max_kv_len(self, stop_len: int) -> int:
        """Most tokens of a request of total length `stop_len` whose KV is ever written.

        The last token's is not; a verified row can write `max_drafts` beyond, and a drafter that
        runs on from there as many again.
        """
        return min(stop_len - 1 + 2 * self.max_drafts, self.max_seq_len)

    def logits_places(self, tokens: int) -> int:
        """Places that need logits in a step of `tokens` token places."""
        return min(tokens, self.decode_tokens)

    @property
    def max_admission_updates(self) -> int:
        """Page-table entries of the requests that one step can admit: those of its tokens, and at
        least one request with the pages of its whole prompt."""
        return max(self.pages_per_seq, self.max_batch + self.pages_for(self.max_tokens))

    @property
    def max_page_updates(self) -> int:
        """Page-table entries that one step can set.

        The bound of a decode row grows by at most the token places of a few steps (it jumps by up
        to two query lengths while results are unread), and each row can start one page more than
        those tokens fill.
        """
        per_row = 1 + self.pages_for(3 * self.decode_query_len)
        return self.max_batch * per_row + self.max_admission_updates


def _check_int(name: str, value: object, *, at_least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise wrong(
            name, f"an integer >= {at_least}", value, f"Pass {name}={max(at_least, 1)} or more."
        )
