"""Nodes of a model's layers in the graph of a decode step, beside what its own operations would be.

A rehearsal counts them: a decode step of small bounds runs on a fake CUDA device. What a step does
follows from the model and not from the bounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from graphattn._capture.errors import CaptureError
from graphattn._capture.node_count import count_nodes
from graphattn.models import adapt
from graphattn.models.contract import StepModel
from graphattn.models.transformers_layers import decoder_layers
from graphattn.rehearse import REHEARSAL
from graphattn.report import LayerNodes
from graphattn.sizing import open_memory, resolve
from graphattn.step import step_program

# Kernels of an operation in a step of decode rows; of others one. Attention launches one more in a
# step that can hold prefill rows.
LAUNCHES = {"graphattn.attend": 2, "graphattn.attend_latent": 2}


class Part(NamedTuple):
    """Of a model: a decoder layer, or the experts of one."""

    layer: int
    experts: bool


def layer_nodes(model: object) -> tuple[LayerNodes, ...]:
    """Of a transformers model, by layer; empty for models without layers as transformers has them,
    and where torch has no CUDA device to fake."""
    try:
        now, before = _counts(adapt(model)), _counts(adapt(model, fuse=False))
    except CaptureError:
        return ()
    return tuple(
        LayerNodes(
            layer=part.layer,
            nodes=nodes.total(),
            unfused=before[part].total(),
            experts=now.get(Part(part.layer, True), Counter()).total(),
            operations=dict(nodes),
        )
        for part, nodes in now.items()
        if part is not None and not part.experts
    )


def _counts(model: StepModel) -> dict[Part | None, Counter[str]]:
    config = resolve(REHEARSAL, model)
    memory, _ = open_memory(model, config, None)
    program = step_program(model, memory, config.buckets.decode[-1])
    tree: Any = getattr(model, "module", None)
    chooses = getattr(tree, "_can_set_experts_implementation", None)
    if model.dtype != torch.bfloat16 and chooses is not None and chooses():
        tree.set_experts_implementation("batched_mm")  # a GPU has grouped products of bf16 only
    running: list[Part] = []
    with _noted(tree, running):
        return count_nodes(program, lambda: running[-1] if running else None, LAUNCHES)


@contextmanager
def _noted(tree: object, running: list[Part]) -> Iterator[None]:
    """Keep the parts of a tree that run in `running`, the innermost last."""
    with ExitStack() as hooks:
        for part, module in _parts(tree):
            enter = module.register_forward_pre_hook(lambda *_, part=part: running.append(part))
            leave = module.register_forward_hook(lambda *_: running.pop() and None)
            hooks.callback(enter.remove)
            hooks.callback(leave.remove)
        yield


def _parts(tree: object) -> Iterator[tuple[Part, nn.Module]]:
    for index, layer in decoder_layers(tree) if isinstance(tree, nn.Module) else ():
        yield Part(index, False), layer
        for module in layer.modules():
            if isinstance(getattr(module, "experts", None), nn.Module):
                yield Part(index, True), module
