"""Adapters: what turns a model into something the step program can run."""

from __future__ import annotations

from graphattn._capture.compiled import REASON, graphs_of_its_own, uncompiled
from graphattn.errors import UnsupportedModelError
from graphattn.models.contract import StepModel
from graphattn.models.weights import Weights, weights
from graphattn.versions import require

__all__ = ["Weights", "adapt", "notes", "weights"]

_CONTRACT = ("attention_layers", "vocab_size", "max_seq_len", "eos_token_ids", "dtype", "device")


def adapt(model: object, *, fuse: bool = True) -> StepModel:
    """The model itself if it meets the step contract, else its adapter.

    `fuse` lets the adapter of a transformers model run fused operations in place of the model's
    own, where they compute the same: docs/fusion.md.

    Raises `UnsupportedModelError` when it is neither, or a transformers model that cannot be
    served; the message says what is missing.
    """
    if part := graphs_of_its_own(model):
        raise UnsupportedModelError(f"model: {part} {REASON}")
    missing = [name for name in _CONTRACT if not hasattr(model, name)]
    if not missing and callable(model):
        return model  # type: ignore[return-value]
    if any(c.__module__.startswith("transformers.") for c in type(uncompiled(model)).__mro__):
        require("transformers")
        from graphattn.models import transformers

        return transformers.adapt(model, fuse=fuse)
    raise UnsupportedModelError(
        f"model: wanted a transformers causal LM or a model that meets the step contract "
        f"(graphattn.models.contract.StepModel), got {type(model).__name__} without "
        f"{', '.join(missing) or '__call__'}. See docs/own-model.md."
    )


def notes(model: object) -> tuple[str, ...]:
    """What an adapter runs otherwise than the owner's model, for reports; mostly nothing."""
    return tuple(getattr(model, "notes", ()))
