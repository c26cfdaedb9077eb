"""`MTP`: the multi-token prediction module of a checkpoint drafts.

A module pairs the hidden state of position p with token p + 1 and predicts token p + 2. After the
commit, the first pass runs over the places of the step: place p uses the hidden state h_p that
the target has just computed and token p + 1 of the history, and is a place of the module exactly
when p is below the new context length. That one rule covers prefill chunks, full and partial
acceptance: nothing is moved or corrected. The KV of place p lies at position p, in pages of the
module's own under the target's page tables, sharded like them. What is drafted at the last place
is the first draft. Further modules of a chain follow over the same places, one draft each; beyond
the chain's depth the last one goes on alone, one place per row, from its own hidden state. What
it leaves in its cache there, the next first pass overwrites.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from graphattn.bounds import Bounds
from graphattn.config import Bucket
from graphattn.draft import Drafter, DraftProgram, check_k
from graphattn.drafting import Drafting, DraftingSlots
from graphattn.errors import ConfigError, UnsupportedModelError, wrong
from graphattn.memory import ModelMemory, StepMemory
from graphattn.metadata import StepMetadata, StepRows
from graphattn.models.contract import AttentionLayer, StepModel
from graphattn.models.mtp import MTPModule, adapt_mtp
from graphattn.mtp_overlap import Overlap
from graphattn.view import ModelStep


@dataclass(frozen=True, slots=True)
class MTP:
    """Draft `k` tokens with the target's own multi-token prediction modules.

    `module`: a transformers `MtpModel`, or what meets `graphattn.models.mtp.MTPModule`; None loads
    that of the target's checkpoint, as transformers does. The module shares the target's
    embedding and head.
    """

    k: int
    module: object | None = None

    def __post_init__(self) -> None:
        check_k(self.k)

    def resolve(self, target: StepModel) -> MTP:
        """See `Speculation`. Raises `UnsupportedModelError` when no module is found."""
        return replace(self, module=adapt_mtp(self.module, target))

    def kv_layers(self) -> Sequence[AttentionLayer]:
        """The modules', once resolved. A chain sees places before a step's again, and their windows
        reach back from there."""
        overlap = min(self._resolved.depth, self.k) - 1
        layers = self._resolved.attention_layers
        return [replace(x, window=x.window + overlap) if x.window else x for x in layers]

    @property
    def lookahead(self) -> int | None:
        """Place p pairs with token p + 1. A chain also keeps hidden states of the slot."""
        return 1 if min(self._resolved.depth, self.k) == 1 else None

    def open(self, memory: StepMemory, target: StepModel) -> Drafter:
        """See `Speculation`. Raises `UnsupportedModelError` for a module that does not fit."""
        return _MTPDrafter(self._resolved, self.k, memory, target)

    @property
    def _resolved(self) -> MTPModule:
        return self.module  # type: ignore[return-value]


class _MTPDrafter:
    """The modules that draft, and their memory."""

    def __init__(self, module: MTPModule, k: int, memory: StepMemory, target: StepModel) -> None:
        _check_fit(module, target, memory.bounds)
        self.module, self.step = module, memory
        self.depth = min(module.depth, k)
        self.drafting = Drafting(k, memory)
        self.places: Places = _StepPlaces(memory, self.drafting)
        bounds = memory.bounds
        if (overlap := self.depth - 1) > 0:
            self.places = Overlap(overlap, module, memory, self.drafting)
            bounds = replace(
                bounds,
                max_drafts=bounds.max_drafts + overlap,
                max_tokens=bounds.max_tokens + overlap * bounds.max_batch,
            )
        self.memory = ModelMemory(
            module.attention_layers,
            bounds,
            memory.state.page_table,
            memory.inputs.slot_of_row,
            dtype=module.dtype,
            kv_dtype=memory.kv_dtype,
            group=memory.group,
            reduce=memory.reduce,
            epoch=memory.epoch,
        )

    def program(self, bucket: Bucket) -> DraftProgram:
        return _MTPDraft(self, bucket)

    def pools(self) -> dict[str, Tensor]:
        return {f"mtp.{name}": pool for name, pool in self.memory.pools().items()}

    def scratch(self) -> dict[str, Tensor]:
        named = self.memory.scratch() | self.drafting.scratch() | self.places.scratch()
        return {f"mtp.{name}": tensor for name, tensor in named.items()}

    def lasting(self) -> dict[str, Tensor]:
        return {f"mtp.{name}": tensor for name, tensor in self.places.lasting().items()}

    def models(self) -> dict[str, object]:
        return {"mtp.": self.module}


class Places(Protocol):
    """The places over which every module of a chain runs once in a step."""

    def count(self, tokens: int, rows: int) -> int:
        """How many there are in a step of `tokens` places and `rows` rows."""
        ...

    def begin(self, slots: DraftingSlots) -> None:
        """After the commit."""
        ...

    def rows(self, index: int) -> StepRows:
        """The rows of module `index`."""
        ...

    def hidden(self, step_hidden: Tensor, step: StepMetadata, slots: DraftingSlots) -> Tensor:
        """The target's hidden states at these places; `step_hidden` [T, H] has the step's."""
        ...

    def scratch(self) -> dict[str, Tensor]:
        """What every step rewrites, by name."""
        ...

    def lasting(self) -> dict[str, Tensor]:
        """What outlives a step, by name."""
        ...


class _StepPlaces:
    """One module: the places of the step, no others."""

    def __init__(self, memory: StepMemory, drafting: Drafting) -> None:
        state = memory.state
        self._rows = drafting.step_rows(drafting.committed, state.context_len, state.history[:, 1:])

    def count(self, tokens: int, rows: int) -> int:
        return tokens

    def begin(self, slots: DraftingSlots) -> None:
        pass

    def rows(self, index: int) -> StepRows:
        return self._rows

    def hidden(self, step_hidden: Tensor, step: StepMetadata, slots: DraftingSlots) -> Tensor:
        return step_hidden

    def scratch(self) -> dict[str, Tensor]:
        return {}

    def lasting(self) -> dict[str, Tensor]:
        return {}


class _MTPDraft:
    """The draft stage of one bucket."""

    def __init__(self, drafter: _MTPDrafter, bucket: Bucket) -> None:
        memory, drafting, places = drafter.memory, drafter.drafting, drafter.places
        self._drafter, self._drafting, self._places = drafter, drafting, places
        self._mixed = bucket.mixed
        self._rows = min(drafter.step.bounds.max_batch, bucket.tokens)
        self._chunk = memory.narrow(places.count(bucket.tokens, self._rows))
        self._single = memory.narrow(self._rows)
        self._single_rows = drafting.single_rows(drafter.step.state.history[:, drafter.depth :])

    def remember(self) -> None:
        self._drafting.remember()

    def run(self, features: Mapping[str, Tensor]) -> None:
        drafting, depth = self._drafting, self._drafter.depth
        slots = drafting.begin(self._rows)
        self._places.begin(slots)
        hidden = _hidden_of(features)  # [T, H], then of the module's places, then [rows, H]
        for place in range(drafting.k):
            if place < depth:
                logits, hidden = self._chain_pass(place, hidden, slots)
            else:
                logits, hidden = self._single_pass(place, hidden)
            drafting.keep(place, logits, slots)
        drafting.finish(slots)

    def _chain_pass(
        self, index: int, hidden: Tensor, slots: DraftingSlots
    ) -> tuple[Tensor, Tensor]:
        """Module `index` over all places; logits [rows, V] of the last place of each row.

        Returns the hidden states for the next pass: of all places, or of the last ones when the
        chain ends here.
        """
        memory, step = self._drafter.memory, self._chunk[0]
        memory.prepare(self._chunk, self._places.rows(index))
        if index == 0:
            hidden = self._places.hidden(hidden, step, slots)
        first = step.logits_start[: self._rows].clamp(max=step.logits_token.shape[0] - 1)
        view = ModelStep(self._chunk, memory.attention, mixed=self._mixed)
        view.positions = step.positions + (index + 1)
        view.logits_token = step.logits_token[first.long()]
        logits, hidden = self._drafter.module(view, hidden, index)
        ends = index == self._drafter.depth - 1
        return logits, hidden[view.logits_token] if ends else hidden

    def _single_pass(self, place: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The last module at one more place of each row, from its own hidden states [rows, H]."""
        memory, depth = self._drafter.memory, self._drafter.depth
        self._drafting.move(place - depth)
        memory.prepare(self._single, self._single_rows)
        view = ModelStep(self._single, memory.attention, mixed=False)
        view.positions = view.positions + depth
        logits, hidden = self._drafter.module(view, hidden, depth - 1)
        return logits, hidden


def _hidden_of(features: Mapping[str, Tensor]) -> Tensor:
    if "hidden" not in features:
        raise UnsupportedModelError(
            "MTP: the model offers no hidden states. Put them into step.features['hidden'], "
            "[T, hidden_size], in its call; see docs/mtp.md."
        )
    return features["hidden"]


def _check_fit(module: MTPModule, target: StepModel, bounds: Bounds) -> None:
    if module.vocab_size != target.vocab_size:
        raise UnsupportedModelError(
            f"MTP module: wanted the target's vocabulary of {target.vocab_size}, got "
            f"{module.vocab_size}. Pass the module that was trained with this model."
        )
    if not module.depth < bounds.max_seq_len <= module.max_seq_len:
        raise ConfigError(
            f"max_seq_len: wanted more than the {module.depth} modules look ahead and at most "
            f"their {module.max_seq_len}, got {bounds.max_seq_len}. Change max_seq_len."
        )
    if module.device != target.device:
        raise wrong("MTP module", f"a module on {target.device}", module.device, "Move it there.")
