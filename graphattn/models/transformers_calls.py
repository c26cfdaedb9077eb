"""What transformers says at its two hooks: the attention function, and the mask function.

Importing this module registers two attention implementations, `OBSERVE` and `RUN`. Both hand each
attention call to the `Caller` that travels through the model as a keyword argument. `OBSERVE`
also recognises the masks, which reads them on the host; `RUN` builds none, since the visible
ranges of a step stand for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from graphattn.errors import UnsupportedModelError
from graphattn.models.contract import LowRank, Rotation
from graphattn.models.transformers_latent import absorbed, expanded, is_latent

OBSERVE, RUN = "graphattn_observe", "graphattn"


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a layer asks of its attention function, the mask apart."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    softcap: float
    window: int | None
    has_sinks: bool
    is_latent: bool


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an attention function."""

    layer_idx: int
    geometry: Geometry
    q: Tensor  # [T, num_q_heads, head_dim]
    k: Tensor  # [T, num_kv_heads, head_dim]; latents [T, 1, head_dim] where `is_latent`
    v: Tensor  # [T, num_kv_heads, value_dim]
    sinks: Tensor | None
    k_scale: Tensor | None  # of an FP8 cache, as checkpoints with one have them
    v_scale: Tensor | None
    mask: object
    options: Mapping[str, object]  # what we give no meaning to


class Caller(Protocol):
    """Travels through the model as a keyword argument; receives its attention calls."""

    def attend(self, call: Call) -> Tensor:
        """[T, num_q_heads, value_dim]"""
        ...


class FusedCaller(Caller, Protocol):
    """Receives the calls of fused attentions too."""

    def attend_rotated(
        self,
        layer_idx: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotation: Rotation,
        sinks: Tensor | None,
    ) -> Tensor:
        """Of a fused attention; see `ModelStep.attend_rotated`."""
        ...

    def write_latent(
        self, layer_idx: int, latent: Tensor, rotation: Rotation, query: LowRank | None
    ) -> None:
        """Of a fused latent attention; see `ModelStep.write_latent`."""
        ...

    def attend_written(self, layer_idx: int, q: Tensor, up: Tensor) -> Tensor:
        """Of a fused latent attention; see `ModelStep.attend_written`."""
        ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    graphattn_caller: Caller,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls; q, k, v are [1, heads, T, dim]."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    latent = is_latent(module)
    if latent:
        q = absorbed(module, q)
    geometry = Geometry(
        num_q_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=q.shape[2],
        value_dim=v.shape[2],
        scale=q.shape[2] ** -0.5 if scaling is None else float(scaling),
        softcap=float(softcap or 0.0),
        window=sliding_window,
        has_sinks=s_aux is not None,
        is_latent=latent,
    )
    layer_idx = getattr(module, "layer_idx", None)
    if not isinstance(layer_idx, int):
        raise UnsupportedModelError(f"{type(module).__name__} does not know its layer_idx")
    scales = (getattr(module, "k_scale", None), getattr(module, "v_scale", None))
    call = Call(layer_idx, geometry, q, k, v, s_aux, *scales, attention_mask, options)
    out = graphattn_caller.attend(call)
    return (expanded(module, out) if latent else out).unsqueeze(0), None


@dataclass(frozen=True, slots=True)
class MaskShape:
    """In place of a mask: causal, over the last `window` positions if that is > 0."""

    window: int


def _mask_shape(
    *args: object, mask_function: Callable[..., Tensor], config: PreTrainedConfig, **options: object
) -> MaskShape:
    """Recognise the mask that transformers is about to build by evaluating its rule, on real
    positions also where the model lies on a fake device."""
    with unset_fake_temporarily(), torch.device("cpu"):
        return _evaluated(mask_function, config)


def _evaluated(mask_function: Callable[..., Tensor], config: PreTrainedConfig) -> MaskShape:
    window = getattr(config, "sliding_window", None) or 0
    edge = max(window, getattr(config, "attention_chunk_size", None) or 0, 4)
    zero = torch.zeros((), dtype=torch.long)
    q = torch.cat([torch.arange(2), torch.arange(edge - 1, edge + 2), 2 * edge + torch.arange(3)])
    q, k = q.unsqueeze(1), torch.arange(2 * edge + 3).unsqueeze(0)
    shown = torch.broadcast_to(mask_function(zero, zero, q, k), (q.shape[0], k.shape[1]))
    causal = k <= q
    if torch.equal(shown, causal):
        return MaskShape(window=0)
    if window and torch.equal(shown, causal & (k > q - window)):
        return MaskShape(window=window)
    raise UnsupportedModelError(
        "its attention mask is neither causal nor a causal sliding window "
        "(chunked, bidirectional and prefix masks are not supported)"
    )


AttentionInterface.register(OBSERVE, _attention)
AttentionInterface.register(RUN, _attention)
AttentionMaskInterface.register(OBSERVE, _mask_shape)
AttentionMaskInterface.register(RUN, lambda *args, **options: None)
