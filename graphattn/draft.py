"""Drafters: they guess the next tokens of every slot inside the step, after its commit.

What they guess never changes a token, only how many places of the next step are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from graphattn.bounds import Bounds
from graphattn.config import Bucket
from graphattn.errors import ConfigError, UnsupportedModelError, wrong
from graphattn.kernels import ops
from graphattn.memory import ModelMemory, StepMemory
from graphattn.metadata import StepRows
from graphattn.models import adapt
from graphattn.models.contract import AttentionLayer, StepModel
from graphattn.state import Finish
from graphattn.view import ModelStep


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


class Speculation(Protocol):
    """What `capture` takes as `speculate`: how many drafts, and how to make the drafter."""

    @property
    def k(self) -> int:
        """Drafts of a row, at most."""
        ...

    def resolve(self) -> Speculation:
        """With models adapted to the step contract."""
        ...

    def kv_layers(self) -> Sequence[AttentionLayer]:
        """Attention layers of a resolved drafter that keep KV in the engine's pages."""
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
        _check_k(self.k)
        if not 1 <= self.min_match <= self.max_match:
            raise wrong(
                "min_match, max_match",
                "1 <= min_match <= max_match",
                (self.min_match, self.max_match),
                "Try 1 and 3.",
            )

    def resolve(self) -> NGram:
        """See `Speculation`."""
        return self

    def kv_layers(self) -> Sequence[AttentionLayer]:
        """None: it reads the token history."""
        return ()

    def open(self, memory: StepMemory, target: StepModel) -> Drafter:
        """See `Speculation`."""
        return _Lookup(self, memory)


@dataclass(frozen=True, slots=True)
class DraftModel:
    """Another, smaller causal LM with the same vocabulary drafts `k` tokens greedily.

    Its KV lies in pools of its own under the same page tables.
    """

    model: object
    k: int

    def __post_init__(self) -> None:
        _check_k(self.k)

    def resolve(self) -> DraftModel:
        """See `Speculation`."""
        return replace(self, model=adapt(self.model))

    def kv_layers(self) -> Sequence[AttentionLayer]:
        """The draft model's."""
        return adapt(self.model).attention_layers

    def open(self, memory: StepMemory, target: StepModel) -> Drafter:
        """See `Speculation`. Raises `UnsupportedModelError` for models that do not fit."""
        return _ModelDrafter(adapt(self.model), self.k, memory, target)


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


class _ModelDrafter:
    """A draft model and its memory."""

    def __init__(self, model: StepModel, k: int, memory: StepMemory, target: StepModel) -> None:
        _check_fit(model, target, memory.bounds)
        self.model, self.k, self.step = model, k, memory
        self.memory = ModelMemory(
            model.attention_layers,
            memory.bounds,
            memory.state.page_table,
            memory.inputs.slot_of_row,
            dtype=model.dtype,
            group=memory.group,
            reduce=memory.reduce,
        )
        B, device = memory.bounds.max_batch, memory.state.finish.device

        def zeros() -> Tensor:
            return torch.zeros(B, dtype=torch.int32, device=device)

        self.context_len, self.seq_len, self.finish = zeros(), zeros(), zeros()
        self.query_len, self.nothing = zeros(), zeros()
        self.committed = zeros()  # context length before the commit
        self.tokens = zeros()  # one draft token per row
        self.slots = torch.arange(B, dtype=torch.int32, device=device)

    def program(self, bucket: Bucket) -> DraftProgram:
        return _ModelDraft(self, bucket)

    def pools(self) -> dict[str, Tensor]:
        return {f"draft.{name}": pool for name, pool in self.memory.pools().items()}

    def scratch(self) -> dict[str, Tensor]:
        return {f"draft.{name}": tensor for name, tensor in self.memory.scratch().items()}


class _ModelDraft:
    """First the step's places again with what was committed, then one token per row, k times.

    The first pass is needed: after full acceptance the draft model's cache lacks a position, and
    during prefill it has seen nothing of the chunk. Each pass derives its metadata from the
    committed lengths. Draft tokens stand in the history past `seq_len`, where the next commit
    writes the true ones.
    """

    def __init__(self, drafter: _ModelDrafter, bucket: Bucket) -> None:
        memory, state = drafter.step, drafter.step.state
        self._drafter, self._state, self._bucket = drafter, state, bucket
        self._rows = min(memory.bounds.max_batch, bucket.tokens)
        self._chunk = drafter.memory.narrow(bucket.tokens)
        self._single = drafter.memory.narrow(self._rows)
        inputs = memory.inputs
        shared = (state.history, state.draft_tokens, drafter.nothing, state.page_table)
        self._chunk_rows = StepRows(
            inputs.slot_of_row,
            inputs.query_len,
            drafter.committed,
            state.seq_len,
            state.prompt_len,
            state.finish,
            *shared,
        )
        self._single_rows = StepRows(
            inputs.slot_of_row,
            drafter.query_len,
            drafter.context_len,
            drafter.seq_len,
            drafter.nothing,
            drafter.finish,
            *shared,
        )

    def remember(self) -> None:
        self._drafter.committed.copy_(self._state.context_len)

    def run(self, features: Mapping[str, Tensor]) -> None:
        drafter, state = self._drafter, self._state
        drafter.memory.prepare(self._chunk, self._chunk_rows)
        drafter.model(ModelStep(self._chunk, drafter.memory.attention, mixed=self._bucket.mixed))
        slot_of_row = drafter.step.inputs.slot_of_row
        drafter.query_len.copy_(slot_of_row >= 0)
        row_of_slot = slot_of_row[: self._rows] == drafter.slots[:, None]  # [B, rows]
        row, decodes = row_of_slot.int().argmax(1), row_of_slot.any(1)
        decodes &= (state.finish == Finish.RUNNING) & (state.context_len >= state.prompt_len)
        drafter.finish.copy_(torch.where(decodes, Finish.RUNNING, Finish.FREE))
        for place in range(drafter.k):
            self._pass(place, row, decodes)
        room = torch.minimum(state.stop_len - 1, torch.full_like(state.stop_len, self._end))
        count = (room - state.seq_len).clamp(0, drafter.k)
        state.draft_count.copy_(torch.where(decodes, count, state.draft_count))

    @property
    def _end(self) -> int:
        return self._drafter.step.bounds.max_seq_len

    def _pass(self, place: int, row: Tensor, decodes: Tensor) -> None:
        """Feed the token at seq_len - 1 + place of each decoding slot; keep what follows."""
        drafter, state = self._drafter, self._state
        drafter.context_len.copy_(state.seq_len + (place - 1))
        drafter.seq_len.copy_(state.seq_len + place)
        drafter.memory.prepare(self._single, self._single_rows)
        view = ModelStep(self._single, drafter.memory.attention, mixed=False)
        tokens = drafter.tokens[: self._rows]
        ops.greedy(drafter.model(view), tokens)
        if (group := drafter.step.group) is not None:
            group.broadcast([tokens])
        drafted = tokens.clamp(min=0)[row]  # by slot; a NaN of the draft model is just a bad guess
        column = state.draft_tokens[:, place]
        column.copy_(torch.where(decodes, drafted, column))
        at = (state.seq_len + place).clamp(max=self._end - 1).long()[:, None]
        fits = decodes & (state.seq_len + place < self._end)
        kept = torch.where(fits[:, None], drafted[:, None], state.history.gather(1, at))
        state.history.scatter_(1, at, kept)


def _check_k(k: object) -> None:
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= 15:
        raise wrong("k", "an integer in 1..15", k, "3 to 5 drafts are usual.")


def _check_fit(model: StepModel, target: StepModel, bounds: Bounds) -> None:
    if model.vocab_size != target.vocab_size:
        raise UnsupportedModelError(
            f"draft model: wanted the target's vocabulary of {target.vocab_size}, got "
            f"{model.vocab_size}. Draft with a model of the same family."
        )
    if model.max_seq_len < bounds.max_seq_len:
        raise ConfigError(
            f"max_seq_len: wanted at most the draft model's {model.max_seq_len}, got "
            f"{bounds.max_seq_len}. Lower max_seq_len."
        )
    if model.device != target.device:
        raise wrong("draft model", f"a model on {target.device}", model.device, "Move it there.")
