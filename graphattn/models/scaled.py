"""A step model whose attention layers have other scales of FP8 pages than its own say."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from graphattn.models.contract import AttentionLayer, ModelStep, StepModel


class ScaledModel:
    """Meets `contract.StepModel`: the `model` given, but for its `attention_layers`."""

    def __init__(self, model: StepModel, layers: tuple[AttentionLayer, ...]) -> None:
        self._model = model
        self.attention_layers = layers
        self.module = getattr(model, "module", model)  # whose weights they are

    def __call__(self, step: ModelStep) -> Tensor:
        """See `StepModel`."""
        return self._model(step)

    def __getattr__(self, name: str) -> Any:
        """What the model says of itself."""
        if name == "_model":  # not yet set, as while a copy is made
            raise AttributeError(name)
        return getattr(self._model, name)
