"""`DraftModel`: another, smaller model drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from graphattn.bounds import Bounds
from graphattn.config import Bucket
from graphattn.draft import Drafter, DraftProgram, check_k
from graphattn.drafting import Drafting
from graphattn.errors import ConfigError, UnsupportedModelError, wrong
from graphattn.memory import ModelMemory, StepMemory
from graphattn.models import adapt
from graphattn.models.contract import AttentionLayer, StepModel, slot_tensors
from graphattn.view import ModelStep


@dataclass(frozen=True, slots=True)
class DraftModel:
    """Another, smaller causal LM with the same vocabulary drafts `k` tokens greedily.

    Its KV lies in pools of its own under the same page tables.
    """

    model: object
    k: int

    def __post_init__(self) -> None:
        check_k(self.k)

    def resolve(self, target: StepModel) -> DraftModel:
        """See `Speculation`."""
        fused = getattr(target, "fusion", True) is not None  # as the target is, if it says so
        return replace(self, model=adapt(self.model, fuse=fused))

    def kv_layers(self) -> Sequence[AttentionLayer]:
        """The draft model's."""
        return adapt(self.model).attention_layers

    @property
    def lookahead(self) -> int:
        """As the target's, its KV depends on no later token."""
        return 0

    def open(self, memory: StepMemory, target: StepModel) -> Drafter:
        """See `Speculation`. Raises `UnsupportedModelError` for models that do not fit."""
        return _ModelDrafter(adapt(self.model), self.k, memory, target)


class _ModelDrafter:
    """A draft model and its memory."""

    def __init__(self, model: StepModel, k: int, memory: StepMemory, target: StepModel) -> None:
        _check_fit(model, target, memory.bounds)
        self.model, self.step = model, memory
        self.drafting = Drafting(k, memory)
        self.memory = ModelMemory(
            model.attention_layers,
            memory.bounds,
            memory.state.page_table,
            memory.inputs.slot_of_row,
            dtype=model.dtype,
            kv_dtype=memory.kv_dtype,
            group=memory.group,
            reduce=memory.reduce,
            epoch=memory.epoch,
        )

    def program(self, bucket: Bucket) -> DraftProgram:
        return _ModelDraft(self, bucket)

    def pools(self) -> dict[str, Tensor]:
        return {f"draft.{name}": pool for name, pool in self.memory.pools().items()}

    def scratch(self) -> dict[str, Tensor]:
        named = self.memory.scratch() | self.drafting.scratch()
        return {f"draft.{name}": tensor for name, tensor in named.items()}

    def lasting(self) -> dict[str, Tensor]:
        return {}

    def models(self) -> dict[str, object]:
        return {"draft.": self.model}


class _ModelDraft:
    """First the step's places again with what was committed, then one token per row, k times.

    The first pass is needed: after full acceptance the draft model's cache lacks a position, and
    during prefill it has seen nothing of the chunk.
    """

    def __init__(self, drafter: _ModelDrafter, bucket: Bucket) -> None:
        drafting, state = drafter.drafting, drafter.step.state
        self._drafter, self._drafting, self._bucket = drafter, drafting, bucket
        self._rows = min(drafter.step.bounds.max_batch, bucket.tokens)
        self._chunk = drafter.memory.narrow(bucket.tokens)
        self._single = drafter.memory.narrow(self._rows)
        self._chunk_rows = drafting.step_rows(drafting.committed, state.seq_len, state.history)
        self._single_rows = drafting.single_rows(state.history)

    def remember(self) -> None:
        self._drafting.remember()

    def run(self, features: Mapping[str, Tensor]) -> None:
        drafter, drafting = self._drafter, self._drafting
        attention = drafter.memory.attention
        drafter.memory.prepare(self._chunk, self._chunk_rows)
        drafter.model(ModelStep(self._chunk, attention, mixed=self._bucket.mixed))
        slots = drafting.begin(self._rows)
        for place in range(drafting.k):
            drafting.move(place)
            drafter.memory.prepare(self._single, self._single_rows)
            logits = drafter.model(ModelStep(self._single, attention, mixed=False))
            drafting.keep(place, logits, slots)
        drafting.finish(slots)


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
    if slot_tensors(model):
        raise UnsupportedModelError(
            "draft model: it keeps slot tensors, which a drafter's passes do not move along. Draft "
            "with a model of attention layers only, or with NGram(k)."
        )
    if model.device != target.device:
        raise wrong("draft model", f"a model on {target.device}", model.device, "Move it there.")
