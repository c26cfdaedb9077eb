"""The step contract: all that the runtime asks of a model.

A model that meets it needs no adapter. `examples/own_model.py` is one in under 100 lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, device, dtype

from graphattn.kernels import fused_ops


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Geometry and options of one attention layer.

    `scale` multiplies q . k; `softcap > 0` then maps a score s to softcap * tanh(s / softcap);
    `window > 0` lets a token see the last `window` positions, itself included. `sinks`
    [num_q_heads], fp32, join the softmax denominator.

    `value_dim > 0` makes it a *latent* layer (MLA): a token's only entry is its latent, one for all
    heads (num_kv_heads = 1), head_dim wide; it is the key, and its first value_dim values are the
    value. Served by `ModelStep.attend_latent`; without soft-cap and sinks.

    The scales, fp32 on the model's device, positive, are those of FP8 pages; others do not use
    them. An entry is stored as entry / scale. `k_scale` and `v_scale` are [num_kv_heads], or [1]
    for all heads; `latent_scale` [2] of a latent layer has one for the values and one for the rest,
    the rope key. None is 1.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float = 0.0
    window: int = 0
    sinks: Tensor | None = None
    value_dim: int = 0
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    latent_scale: Tensor | None = None

    @property
    def out_dim(self) -> int:
        """Width of a head of the attention's output."""
        return self.value_dim or self.head_dim

    @property
    def entry_values(self) -> int:
        """Values that a token leaves in the cache: K and V of every KV head, or one latent."""
        return self.head_dim if self.value_dim else 2 * self.num_kv_heads * self.head_dim


class LowRank(NamedTuple):
    """The low-rank half of latent attention's queries, and where its norm goes."""

    x: Tensor  # [T, rank]
    weight: Tensor  # [rank]
    normed: Tensor  # [T, rank]


@dataclass(frozen=True, slots=True)
class Rotation:
    """What becomes of heads, or of latents, between projection and attention, in one operation with
    their write: see `fused_ops.rope_write` and `fused_ops.latent_norm_write`.

    `k_weight` of a latent is that of its norm, of the part that is key and value.
    """

    cos: Tensor | None  # [T, R / 2], one per pair of values; None rotates nothing
    sin: Tensor | None
    pairs_in: bool = False
    pairs_out: bool = False
    q_weight: Tensor | None = None  # [head_dim], of the RMS norm of each query head
    k_weight: Tensor | None = None
    eps: float = 0.0
    style: str = "rounded"

    def write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_slot: Tensor,
        q_out: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        """Finished queries to `q_out`, finished keys and the values to the pools."""
        turn = (self.cos, self.sin, self.q_weight, self.k_weight)
        outputs = (q_out, k_pool, v_pool, k_scale, v_scale)
        kind = (self.eps, self.style, self.pairs_in, self.pairs_out)
        fused_ops.rope_write(q, k, v, *turn, kv_slot, *outputs, *kind)

    def write_latent(
        self,
        latent: Tensor,
        kv_slot: Tensor,
        pool: Tensor,
        scale: Tensor | None = None,
        query: LowRank | None = None,
    ) -> None:
        """Finished latents to the pool; the norm of `query` along the way."""
        turn = (self.cos, self.sin, self.k_weight)
        kind = (self.eps, self.style, self.pairs_in, self.pairs_out)
        rows = query or (None, None, None)
        fused_ops.latent_norm_write(*rows, latent, *turn, kv_slot, pool, scale, *kind)

    def absorb(self, q: Tensor, up: Tensor, absorbed: Tensor) -> None:
        """Queries in the space of the latents; see `fused_ops.absorb_query`."""
        kind = (self.pairs_in, self.pairs_out)
        fused_ops.absorb_query(q, up, self.cos, self.sin, absorbed, *kind)


@dataclass(frozen=True, slots=True)
class SlotTensor:
    """A tensor that a model keeps of every slot from step to step: a recurrent state, a counter.

    A request starts from `fill` everywhere, also when it starts anew after a preemption.
    """

    shape: tuple[int, ...]  # of one slot
    dtype: dtype = torch.float32
    fill: float = 0


class StepSlots(Protocol):
    """A step by rows, and the model's `SlotTensor`s in it. R rows, T token places, k drafts.

    The tokens of a row are adjacent, those of a slot are in one row, and padding rows and places
    come wherever they like. A model reads what it keeps of each row's slot with `start`, works
    through the tokens, and hands the states after the last 1 + k tokens of each row to `keep`.
    After the commit the runtime selects: what counts is the state after the last token that the
    context then holds, whatever drafts were accepted. Slots without a new token keep theirs, bit
    for bit.

    Rows must not mix: a NaN of one request must not reach another's state, so choose with `where`
    between rows, and never multiply by 0.
    """

    slot_of_row: Tensor  # [R] int32; -1 = padding row
    query_start: Tensor  # [R + 1] int32: first place of each row
    token_count: Tensor  # [R] int32: tokens of the row, in its first places; may be 0
    admitted: Tensor  # [R] bool: the first step of a request, which starts from `fill`
    row: Tensor  # [T] int64: row of each place; 0 for places of no row
    offset: Tensor  # [T] int64: number of the place in its row
    exists: Tensor  # [T] bool: the place holds a token
    kept_places: Tensor  # [R, 1 + k] int64: the places whose states `keep` wants

    def start(self, name: str) -> Tensor:
        """What the model keeps of the slot of each row, before the step: [R, *shape], a copy."""
        ...

    def keep(self, name: str, states: Tensor) -> None:
        """What it would be after each of `kept_places`: [R, 1 + k, *shape], in the tensor's dtype.

        With states [T, *shape] of all places that is `states[kept_places]`. Where a row has fewer
        tokens, places repeat. Every tensor must be kept in every call of the model.
        """
        ...

    def tensor(self, name: str) -> Tensor:
        """The tensor itself, [max_batch, *shape] by slot, for kernels that index it. Read only;
        of an `admitted` slot it still holds an earlier request's."""
        ...


class ModelStep(Protocol):
    """What a model sees of a step: T token places, of which L need logits.

    Places without a token hold id 0 and position 0; what a model computes there is ignored.
    """

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    logits_token: Tensor  # [L] int64: places whose logits are wanted, in order
    # What a model offers to a drafter, by name; "hidden" [T, hidden_size] is what MTP starts from.
    features: dict[str, Tensor]

    @property
    def slots(self) -> StepSlots:
        """The step by rows; `UnsupportedModelError` but in the steps of an engine's model."""
        ...

    def layer(self, index: int) -> AbstractContextManager[None]:
        """A `with` block around layer `index`, whose name profilers give to all that it launches.

        Optional: without it a profile tells the layers' attention apart, not the rest of them.
        """
        ...

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

    def attend_rotated(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation
    ) -> Tensor:
        """`attend` of heads as they were projected: norm and rotation are still to be done, in
        one operation with the write. Shapes as of `attend`, any strides of tokens and heads."""
        ...

    def write_latent(
        self, layer: int, latent: Tensor, rotation: Rotation, query: LowRank | None
    ) -> None:
        """Norm, rotate and write latents [T, head_dim] as they were projected; norm `query`."""
        ...

    def attend_written(self, layer: int, q: Tensor, up: Tensor) -> Tensor:
        """`attend_latent` after `write_latent`, and W_UV, `up` [num_q_heads, V, value_dim].

        Returns [T, num_q_heads, V].
        """
        ...


class StepModel(Protocol):
    """A model that can be captured. Its weights keep their addresses; its forward reads no device
    value on the host, makes no tensor from Python data, and depends on nothing but the step.

    A model may also have `slot_tensors`, a mapping from names to `SlotTensor`: what it keeps of
    every slot beside its KV; see `StepSlots`. Requests of such a model share no prefixes.
    """

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


def slot_tensors(model: StepModel) -> Mapping[str, SlotTensor]:
    """What the model keeps of every slot; mostly nothing."""
    return getattr(model, "slot_tensors", {})
