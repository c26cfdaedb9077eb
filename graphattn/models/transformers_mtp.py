"""Adapter of transformers' `MtpModel`: the layer or layers that predict tokens further ahead.

As for the target, a second tree of modules runs over the same parameters. Embedding, head and
rotation are the target's, which `MtpModel` shares. The hidden state that it starts from is the
last of the target's `hidden_states`: after the final norm for all but a few families, exactly what
`generate(use_mtp=True)` hands over.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from graphattn.errors import UnsupportedModelError
from graphattn.models.contract import ModelStep, StepModel
from graphattn.models.fusion import Fusion, fuse
from graphattn.models.fusion.rehearsal import Rehearsal
from graphattn.models.mtp import MTPOutput
from graphattn.models.transformers import (
    ObservedLayer,
    Observer,
    Runner,
    observed_layer,
    second_tree,
    set_attention,
    set_experts,
)
from graphattn.models.transformers_calls import OBSERVE, RUN, Caller
from graphattn.models.transformers_checks import unsupported
from graphattn.models.transformers_latent import use_latents
from graphattn.models.transformers_layers import name_layers
from graphattn.models.weights import follow


def adapt(module: object | None, target: StepModel) -> TransformersMTP:
    """The modules of an `MtpModel`, or of the checkpoint of a transformers target.

    Raises `UnsupportedModelError`, which says what is missing.
    """
    owner: PreTrainedModel = target.module  # type: ignore[attr-defined]
    if module is None:
        module = _load(owner)
    if not isinstance(module, MtpModel):
        raise UnsupportedModelError(
            f"module: wanted a transformers MtpModel, got {type(module).__name__}. "
            "MtpModel.from_pretrained(model) loads one."
        )
    tree = second_tree(module.eval())
    use_latents(tree)
    set_experts(tree, owner.config.get_text_config(decoder=True)._experts_implementation)
    set_attention(tree, OBSERVE)
    layers = _observe(tree)
    set_attention(tree, RUN)
    fusion = None
    if getattr(target, "fusion", None) is not None:  # as the target
        last = target.max_seq_len - 1
        fusion = fuse(tree, lambda: _forward(tree, Rehearsal(), last), layers[0].kv_dtype)
    return TransformersMTP(tree, module, layers, target, fusion)


class TransformersMTP:
    """Meets `mtp.MTPModule`. Made by `adapt`."""

    def __init__(
        self,
        module: Any,
        owner: MtpModel,
        layers: tuple[ObservedLayer, ...],
        target: StepModel,
        fusion: Fusion | None,
    ) -> None:
        self.module, self.owner, self.fusion = module, owner, fusion
        self.notes = () if fusion is None else fusion.notes
        self.depth = len(layers)
        self.hidden_size: int = module.config.hidden_size
        self.vocab_size = target.vocab_size
        self.max_seq_len = target.max_seq_len
        self.attention_layers = tuple(layer.spec for layer in layers)
        self.dtype = layers[0].kv_dtype
        self.device = layers[0].device
        self._expected = {x.layer_idx: (i, x) for i, x in enumerate(layers)}
        # The visible ranges of a step stand for masks; making one reads positions on the host.
        module.create_masks_for_mtp_layer = _no_masks
        name_layers(module)

    def follow_owner(self) -> None:
        """Run over the parameters and buffers that the owner's modules have now."""
        follow(self.module, self.owner)
        if self.fusion is not None:
            self.fusion.join()

    def __call__(self, step: ModelStep, hidden: Tensor, index: int) -> MTPOutput:
        """See `mtp.MTPModule`."""
        hidden = self.module.forward_layer(
            index,
            hidden.unsqueeze(0),
            step.positions.unsqueeze(0),
            None,
            input_ids=step.input_ids.unsqueeze(0),
            graphattn_caller=Runner(step, self._expected),
        )
        logits = self.module._project_to_logits(hidden[:, step.logits_token])
        return MTPOutput(logits[0], hidden[0])


def _load(owner: PreTrainedModel) -> MtpModel:
    """What `MtpModel.from_pretrained` finds in the owner's checkpoint.

    transformers knows some families' modules by the layer number of the published size; a model of
    another size numbers them from its own last layer on.
    """
    config = owner.config.get_text_config()
    depth = getattr(config, "num_mtp_layers", None)
    if not depth:
        raise unsupported(
            owner,
            "its configuration names no MTP modules (num_nextn_predict_layers); pass them with "
            "MTP(k, module=...), or speculate with NGram(k)",
        )
    if not owner.config.name_or_path:
        raise unsupported(
            owner,
            f"it was not loaded from a checkpoint in which its {depth} MTP modules could be found; "
            "pass MTP(k, module=...), a transformers MtpModel",
        )
    first = config.num_hidden_layers
    own = {rf"(^|\.)layers\.{i}\." for i in range(first, first + depth)}
    known = set(owner._keys_to_ignore_on_load_unexpected or ())
    owner._keys_to_ignore_on_load_unexpected = known | own
    try:
        return MtpModel.from_pretrained(owner, device_map={"": owner.device})
    except (OSError, RuntimeError, ValueError, re.error) as error:
        raise unsupported(
            owner,
            f"its {depth} MTP modules cannot be loaded from {config.name_or_path!r}: "
            f"{str(error).strip().splitlines()[0]}; load them yourself and pass "
            "MTP(k, module=...), a transformers MtpModel",
        ) from error


def _forward(module: Any, caller: Caller, last_position: int) -> None:
    """Two tokens through each module, the second of them at `last_position`."""
    places = torch.arange(2, device=next(module.parameters()).device).unsqueeze(0)
    ids = torch.zeros_like(places)
    hidden = module.embed_tokens(ids)
    positions = places + (last_position - 1)
    for index in range(len(module.layers)):
        module.forward_layer(index, hidden, positions, None, input_ids=ids, graphattn_caller=caller)


@torch.no_grad()
def _observe(module: Any) -> tuple[ObservedLayer, ...]:
    """What the layers ask for, of each module in turn."""
    observer = Observer()
    try:
        _forward(module, observer, last_position=1)
    except UnsupportedModelError as error:
        raise unsupported(module, str(error)) from None
    layers = tuple(observed_layer(module, call) for call in observer.calls)
    if [x.layer_idx for x in layers] != list(range(len(module.layers))):
        raise unsupported(
            module,
            f"of {len(module.layers)} modules, {len(layers)} called the attention function; each "
            "must, once",
        )
    return layers


def _no_masks(*args: object) -> dict[str, None]:
    return {"attention_mask": None}
