"""What a model sees of a step: the runtime's side of `models.contract.ModelStep`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from graphattn._capture import nvtx_ranges
from graphattn.attention import Attention
from graphattn.errors import UnsupportedModelError
from graphattn.metadata import StepMetadata
from graphattn.models.contract import LowRank, Rotation
from graphattn.slots import SlotMemory, StepSlots


class ModelStep:
    """A step of one bucket; `shards` has the metadata of each rank of this process.

    A model can put tensors of its own under a name into `features`: a drafter finds them there
    after the commit, place by place.
    """

    def __init__(
        self,
        shards: Sequence[StepMetadata],
        attention: Attention,
        *,
        mixed: bool,
        slots: SlotMemory | None = None,
    ) -> None:
        self.input_ids = shards[0].input_ids
        self.positions = shards[0].positions
        self.logits_token = shards[0].logits_token
        self.features: dict[str, Tensor] = {}
        self._shards = shards
        self._attention = attention
        self._mixed = mixed
        self._slot_memory = slots
        self._slots: StepSlots | None = None

    @property
    def slots(self) -> StepSlots:
        """The step by rows, and what the model keeps of their slots; see the contract."""
        if self._slots is None:
            if self._slot_memory is None:
                raise UnsupportedModelError(
                    "step.slots: an engine has them, the passes of a drafter and StepBuffers do not"
                )
            self._slots = StepSlots(self._slot_memory, self._shards[0])
        return self._slots

    def commit_slots(self) -> None:
        """After the commit of tokens: what the model keeps of the slots follows."""
        if self._slot_memory is not None and self._slot_memory.specs:
            self.slots.commit()

    def layer(self, index: int) -> AbstractContextManager[None]:
        """A `with` block that profilers name after layer `index`; see the contract."""
        return _range(f"layer.{index}")

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write K and V, attend over what each token may see; see the contract."""
        with _range(f"attend.{layer}"):
            return self._attention.attend(layer, q, k, v, self._shards, mixed=self._mixed)

    def attend_latent(self, layer: int, q: Tensor, latent: Tensor) -> Tensor:
        """Write the latents, attend over what each token may see; see the contract."""
        with _range(f"attend_latent.{layer}"):
            return self._attention.attend_latent(layer, q, latent, self._shards, mixed=self._mixed)

    def attend_rotated(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation
    ) -> Tensor:
        """Norm, rotate and write, attend; see the contract."""
        with _range(f"attend.{layer}"):
            return self._attention.attend_rotated(
                layer, q, k, v, rotation, self._shards, mixed=self._mixed
            )

    def write_latent(
        self, layer: int, latent: Tensor, rotation: Rotation, query: LowRank | None
    ) -> None:
        """Norm, rotate and write the latents; see the contract."""
        self._attention.write_latent(layer, latent, rotation, query, self._shards)

    def attend_written(self, layer: int, q: Tensor, up: Tensor) -> Tensor:
        """Attend over written latents, apply W_UV; see the contract."""
        with _range(f"attend_latent.{layer}"):
            return self._attention.attend_written(layer, q, up, self._shards, mixed=self._mixed)


def _range(name: str) -> AbstractContextManager[None]:
    """For profilers; torch.compile cannot trace what they are made of."""
    return nullcontext() if torch.compiler.is_compiling() else nvtx_ranges.scope(name)
