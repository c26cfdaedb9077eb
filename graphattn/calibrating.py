"""calibrate_kv(): scales of FP8 pages from the K and V of sample prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from graphattn.arguments import FP8
from graphattn.capturing import capture
from graphattn.engine import Engine
from graphattn.errors import wrong
from graphattn.models import adapt
from graphattn.models.contract import AttentionLayer, StepModel
from graphattn.models.scaled import ScaledModel

MAX_FP8 = torch.finfo(FP8).max
PAGE_SIZE = 64


def calibrate_kv(
    model: object, prompts: Sequence[Sequence[int]], *, headroom: float = 2.0
) -> StepModel:
    """The model with scales of its FP8 pages, by KV head, for `graphattn.capture`.

        scaled = graphattn.calibrate_kv(model, prompts)
        engine = graphattn.capture(scaled, 8, kv_dtype=torch.float8_e4m3fn)

    The prompts run eagerly, one after the other, with pages of the model's dtype. The largest |K|
    and |V| of each head, or |value| and |rope key| of a latent layer, then come to lie `headroom`
    times below the largest FP8 value. Values that a later request pushes beyond it saturate;
    `headroom` costs nothing but range at the other end, where the format has its subnormals.

    Args:
        model: as for `graphattn.capture`. It is not changed; its weights are shared.
        prompts: token ids that are like what will be served.
        headroom: at least 1.

    Raises `ConfigError`, or what `capture` raises for the model.
    """
    if not isinstance(headroom, (int, float)) or not headroom >= 1:
        raise wrong("headroom", "a number of at least 1", headroom, "Pass 2.0.")
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise wrong("prompts", "token ids of at least one prompt, none empty", prompts, "Add some.")
    step_model = adapt(model)
    longest = max(len(prompt) for prompt in prompts)
    engine = capture(
        step_model,
        max_batch=1,
        max_seq_len=longest + 1,
        max_tokens=min(longest, 512),
        page_size=PAGE_SIZE,
        num_pages=-(-(longest + 1) // PAGE_SIZE),
        backend="eager",
        prefix_reuse=False,
    )
    layers = step_model.attention_layers
    with engine:
        peaks = [torch.zeros_like(peak) for peak in _peaks(engine, layers)]
        for prompt in prompts:
            engine.generate([prompt], max_new_tokens=1)
            for peak, new in zip(peaks, _peaks(engine, layers), strict=True):
                torch.maximum(peak, new, out=peak)
    scales = [torch.where(p > 0, p * (headroom / MAX_FP8), 1.0) for p in peaks]
    return ScaledModel(step_model, _with_scales(layers, scales))


def _peaks(engine: Engine, layers: Sequence[AttentionLayer]) -> list[Tensor]:
    """Largest absolute values in the pages: K and V of each layer by head, or of a latent's parts.

    Pages hold zeros where nothing was written, and what earlier prompts left.
    """
    named = engine.pools()
    peaks = []
    for i, layer in enumerate(layers):
        keys = named[f"keys.{i}@0"].abs().float()
        if layer.value_dim:
            parts = (keys[..., : layer.value_dim], keys[..., layer.value_dim :])
            peaks.append(torch.stack([part.amax() for part in parts]))
        else:
            peaks += [keys.amax((0, 2, 3)), named[f"values.{i}@0"].abs().float().amax((0, 2, 3))]
    return peaks


def _with_scales(
    layers: Sequence[AttentionLayer], scales: Sequence[Tensor]
) -> tuple[AttentionLayer, ...]:
    """The layers with the scales of `_peaks`' order."""
    left = iter(scales)
    return tuple(
        replace(layer, latent_scale=next(left))
        if layer.value_dim
        else replace(layer, k_scale=next(left), v_scale=next(left))
        for layer in layers
    )
