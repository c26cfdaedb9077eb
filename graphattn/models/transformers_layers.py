"""Names for profilers: what a decoder layer of a transformers model launches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import nn

from graphattn._capture import nvtx_ranges


def name_layers(tree: nn.Module) -> None:
    """Open the range `layer.N` around each decoder layer of `tree`, if a profiler listens."""
    if nvtx_ranges.listening():
        for index, layer in decoder_layers(tree):
            _name(layer, f"layer.{index}")


def decoder_layers(tree: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """Members of module lists that hold the parts of exactly one layer, with its index."""
    for child in tree.children():
        known = (getattr(part, "layer_idx", None) for part in child.modules())
        indices = {index for index in known if isinstance(index, int)}
        if isinstance(tree, nn.ModuleList) and len(indices) == 1:
            yield indices.pop(), child
        elif indices:
            yield from decoder_layers(child)


def _name(layer: nn.Module, name: str) -> None:
    """torch.compile cannot trace a range: what it compiles keeps that of the caller."""
    entered: list[AbstractContextManager[None]] = []

    def enter(*args: object) -> None:
        if not torch.compiler.is_compiling():
            block = nvtx_ranges.scope(name)
            block.__enter__()
            entered.append(block)

    def leave(*args: object) -> None:
        if not torch.compiler.is_compiling():
            entered.pop().__exit__(None, None, None)

    layer.register_forward_pre_hook(enter)
    layer.register_forward_hook(leave, always_call=True)
