"""Which attention layers the kernels cover."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphattn.errors import UnsupportedModelError
from graphattn.kernels.tiles import (
    MAX_HEAD_DIM,
    MAX_LATENT_HEADS,
    MAX_LATENT_ROPE_DIM,
    MAX_LATENT_VALUE_DIM,
)
from graphattn.models.contract import AttentionLayer


def check_layers(layers: Sequence[AttentionLayer]) -> None:
    """Raise `UnsupportedModelError` for a geometry that the kernels do not cover."""
    if not layers:
        raise UnsupportedModelError("the model has no attention layer: nothing to serve")
    for i, x in enumerate(layers):
        if x.value_dim:
            _check_latent(i, x)
            continue
        if x.num_q_heads % x.num_kv_heads or not 1 <= x.num_q_heads // x.num_kv_heads <= 16:
            raise UnsupportedModelError(
                f"layer {i}: {x.num_q_heads} query heads on {x.num_kv_heads} KV heads; "
                "supported are 1 to 16 query heads per KV head"
            )
        if not 1 <= x.head_dim <= MAX_HEAD_DIM:
            raise UnsupportedModelError(
                f"layer {i}: head size {x.head_dim}; supported: 1 to {MAX_HEAD_DIM}"
            )
        _check_scale(i, "k_scale", x.k_scale, (1, x.num_kv_heads))
        _check_scale(i, "v_scale", x.v_scale, (1, x.num_kv_heads))
        _check_scale(i, "latent_scale", x.latent_scale, ())


def _check_latent(index: int, layer: AttentionLayer) -> None:
    name = f"layer {index}: latent attention"
    if not 1 <= layer.num_q_heads <= MAX_LATENT_HEADS or layer.num_kv_heads != 1:
        raise UnsupportedModelError(
            f"{name} of {layer.num_q_heads} query heads on {layer.num_kv_heads} latents; "
            f"supported are 1 to {MAX_LATENT_HEADS} heads on one"
        )
    rope_dim = layer.head_dim - layer.value_dim
    if layer.value_dim > MAX_LATENT_VALUE_DIM or not 1 <= rope_dim <= MAX_LATENT_ROPE_DIM:
        raise UnsupportedModelError(
            f"{name} with latents of {layer.value_dim} + {rope_dim} values; supported are 1 to "
            f"{MAX_LATENT_VALUE_DIM} that are key and value, and 1 to {MAX_LATENT_ROPE_DIM} that "
            "are key only"
        )
    if layer.softcap or layer.sinks is not None:
        raise UnsupportedModelError(f"{name} with a soft-cap or sinks is not supported")
    _check_scale(index, "k_scale", layer.k_scale, ())
    _check_scale(index, "v_scale", layer.v_scale, ())
    _check_scale(index, "latent_scale", layer.latent_scale, (2,))


def _check_scale(index: int, name: str, scale: Tensor | None, sizes: tuple[int, ...]) -> None:
    """`sizes`: of a scale that the layer may have."""
    if scale is None:
        return
    fits = scale.dim() == 1 and scale.shape[0] in sizes and scale.is_contiguous()
    if not fits or scale.dtype != torch.float32:
        wanted = " or ".join(f"[{size}]" for size in sorted(set(sizes))) or "None"
        raise UnsupportedModelError(
            f"layer {index}: {name} of {scale.dtype} {list(scale.shape)}; "
            f"wanted {wanted} of contiguous float32 values, or none"
        )
