"""The step contract: all that the runtime asks of a model.

A model that meets it needs no adapter. `examples/own_model.py` is one in under 100 lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, device, dtype


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Geometry and options of one attention layer.

    `scale` multiplies q . k; `softcap > 0` then maps a score s to softcap * tanh(s / softcap);
    `window > 0` lets a token see the last `window` positions, itself included. `sinks`
    [num_q_heads], fp32, join the softmax denominator.

    `value_dim > 0` makes it a *latent* layer (MLA): a token's only entry is its latent, one for all
    heads (num_kv_heads = 1), head_dim wide; it is the key, and its first value_dim values are the
    value. Served by `ModelStep.attend_latent`; without soft-cap and sinks.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float = 0.0
    window: int = 0
    sinks: Tensor | None = None
    value_dim: int = 0

    @property
    def out_dim(self) -> int:
        """Width of a head of the attention's output."""
        return self.value_dim or self.head_dim

    @property
    def entry_values(self) -> int:
        """Values that a token leaves in the cache: K and V of every KV head, or one latent."""
        return self.head_dim if self.value_dim else 2 * self.num_kv_heads * self.head_dim


class ModelStep(Protocol):
    """What a model sees of a step: T token places, of which L need logits.

    Places without a token hold id 0 and position 0; what a model computes there is ignored.
    """

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    logits_token: Tensor  # [L] int64: places whose logits are wanted, in order
    # What a model offers to a drafter, by name; "hidden" [T, hidden_size] is what MTP starts from.
    features: dict[str, Tensor]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write K and V, attend over what each token may see.

        q [T, num_q_heads, head_dim], k and v [T, num_kv_heads, head_dim], positions already
        applied; any strides with a contiguous last dimension. Returns [T, num_q_heads, head_dim]
        in a buffer of the runtime that the next call overwrites.
        """
        ...

    def attend_latent(self, layer: int, q: Tensor, latent: Tensor) -> Tensor:
        """`attend` for a latent layer: write the latents, attend over what each token may see.

        q [T, num_q_heads, head_dim] in the space of the latents (W_UK absorbed), latent
        [T, head_dim], positions already applied; contiguous last dimensions. Returns
        [T, num_q_heads, value_dim] (W_UV is still to be applied), in a buffer as of `attend`.
        """
        ...


class StepModel(Protocol):
    """A model that can be captured. Its weights keep their addresses; its forward reads no device
    value on the host, makes no tensor from Python data, and depends on nothing but the step."""

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """One entry per attention layer, in the order of `ModelStep.attend`'s `layer`."""
        ...

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        ...

    @property
    def max_seq_len(self) -> int:
        """Longest sequence that the model's positions allow."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a request unless it says otherwise."""
        ...

    @property
    def dtype(self) -> dtype:
        """Of K and V, or latents, as the attention receives them."""
        ...

    @property
    def device(self) -> device:
        """Of weights, KV pages and steps."""
        ...

    def __call__(self, step: ModelStep) -> Tensor:
        """Logits [L, vocab_size] of the places `step.logits_token`."""
        ...
