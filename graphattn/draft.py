"""Drafters: they guess the next tokens of every slot inside the step, after its commit.

What they guess never changes a token, only how many places of the next step are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from graphattn.config import Bucket
from graphattn.errors import wrong
from graphattn.kernels import ops
from graphattn.memory import StepMemory
from graphattn.models.contract import AttentionLayer, StepModel


class DraftProgram(Protocol):
    """The draft stage of one bucket."""

    def remember(self) -> None:
        """Before the commit: keep what the commit will change."""
        ...

    def run(self, features: Mapping[str, Tensor]) -> None:
        """After the commit: write `draft_tokens` and `draft_count` of the slot state.

        `features` are the tensors that the model offered in this step, by name.
        """
        ...


class Drafter(Protocol):
    """A drafter with its memory."""

    def program(self, bucket: Bucket) -> DraftProgram:
        """The draft stage of one bucket."""
        ...

    def pools(self) -> dict[str, Tensor]:
        """KV pools of its own, by name."""
        ...

    def scratch(self) -> dict[str, Tensor]:
        """What every step rewrites, by name."""
        ...

    def lasting(self) -> dict[str, Tensor]:
        """What outlives a step, but for the pools, by name."""
        ...

    def models(self) -> dict[str, object]:
        """Models and modules whose weights it uses, by a prefix for their names."""
        ...


class Speculation(Protocol):
    """What `capture` takes as `speculate`: how many drafts, and how to make the drafter."""

    @property
    def k(self) -> int:
        """Drafts of a row, at most."""
        ...

    def resolve(self, target: StepModel) -> Speculation:
        """With models and modules adapted to the step contract, for this target. Resolving what is
        resolved changes nothing."""
        ...

    def kv_layers(self) -> Sequence[AttentionLayer]:
        """Attention layers of a resolved drafter that keep KV in the engine's pages."""
        ...

    @property
    def lookahead(self) -> int | None:
        """Tokens beyond a position that its KV of that position depends on. None: requests cannot
        share the KV of equal prefixes, since a drafter keeps more of a slot than that."""
        ...

    def open(self, memory: StepMemory, target: StepModel) -> Drafter:
        """The drafter, with its memory allocated."""
        ...


@dataclass(frozen=True, slots=True)
class NGram:
    """Prompt lookup: draft what followed the latest earlier occurrence of the last tokens.

    Up to `k` drafts after a match of `max_match` down to `min_match` tokens.
    """

    k: int
    min_match: int = 1
    max_match: int = 3

    def __post_init__(self) -> None:
        check_k(self.k)
        if not 1 <= self.min_match <= self.max_match:
            raise wrong(
                "min_match, max_match",
                "1 <= min_match <= max_match",
                (self.min_match, self.max_match),
                "Try 1 and 3.",
            )

    def resolve(self, target: StepModel) -> NGram:
        """See `Speculation`."""
        return self

    def kv_layers(self) -> Sequence[AttentionLayer]:
        """None: it reads the token history."""
        return ()

    @property
    def lookahead(self) -> int:
        """None of its own KV."""
        return 0

    def open(self, memory: StepMemory, target: StepModel) -> Drafter:
        """See `Speculation`."""
        return _Lookup(self, memory)


class _Lookup:
    """Needs nothing but the token history: one and the same program for all buckets."""

    def __init__(self, lookup: NGram, memory: StepMemory) -> None:
        self._lookup, self._state = lookup, memory.state

    def program(self, bucket: Bucket) -> DraftProgram:
        return self

    def remember(self) -> None:
        pass

    def run(self, features: Mapping[str, Tensor]) -> None:
        state = self._state
        ops.ngram_draft(
            state.history,
            state.seq_len,
            state.context_len,
            state.stop_len,
            state.finish,
            state.draft_tokens,
            state.draft_count,
            self._lookup.min_match,
            self._lookup.max_match,
        )

    def pools(self) -> dict[str, Tensor]:
        return {}

    def scratch(self) -> dict[str, Tensor]:
        return {}

    def lasting(self) -> dict[str, Tensor]:
        return {}

    def models(self) -> dict[str, object]:
        return {}


def check_k(k: object) -> None:
    """Raise `ConfigError` unless `k` is a number of drafts."""
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= 15:
        raise wrong("k", "an integer in 1..15", k, "3 to 5 drafts are usual.")
