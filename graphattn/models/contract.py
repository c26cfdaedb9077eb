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
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float = 0.0
    window: int = 0
    sinks: Tensor | None = None


class ModelStep(Protocol):
    """What a model sees of a step: T token places, of which L need logits.

    Places without a token hold id 0 and position 0; what a model computes there is ignored.
    """

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    logits_token: Tensor  # [L] int64: places whose logits are wanted, in order

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write K and V, attend over what each token may see.

        q [T, num_q_heads, head_dim], k and v [T, num_kv_heads, head_dim], positions already
        applied; any strides with a contiguous last dimension. Returns [T, num_q_heads, head_dim]
        in a buffer of the runtime that the next call overwrites.
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
        """Of K and V as the attention receives them."""
        ...

    @property
    def device(self) -> device:
        """Of weights, KV pages and steps."""
        ...

    def __call__(self, step: ModelStep) -> Tensor:
        """Logits [L, vocab_size] of the places `step.logits_token`."""
        ...
