"""Adapter of transformers causal LMs: their attention function becomes `step.attend`.

The owner's model is not touched. The adapter runs a second tree of modules over the same
parameters and buffers, with a configuration of its own that names our attention function.
That tree is observed once, on two tokens: what each layer hands to its attention function, and
the mask that the model means to build, give geometry, window, soft-cap and sinks. In a step
each layer is held to what was observed.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from graphattn._capture.compiled import compiler_of, plain, uncompiled
from graphattn.errors import UnsupportedModelError
from graphattn.models.contract import AttentionLayer, LowRank, ModelStep, Rotation
from graphattn.models.fusion import Fusion
from graphattn.models.fusion import fuse as fuse_tree
from graphattn.models.fusion.rehearsal import Rehearsal
from graphattn.models.transformers_calls import OBSERVE, RUN, Call, Caller, Geometry, MaskShape
from graphattn.models.transformers_checks import check, graph_safe_experts, unsupported
from graphattn.models.transformers_latent import check_latents, latent_note, use_latents
from graphattn.models.transformers_layers import name_layers
from graphattn.models.weights import follow


def adapt(model: object, *, fuse: bool = True) -> TransformersModel:
    """The step model of a transformers causal LM; see `fusion` for what `fuse` does.

    Raises `UnsupportedModelError`, which says what is missing.
    """
    owner = check(uncompiled(model))
    check_latents(owner)
    experts = graph_safe_experts(owner)
    config = owner.config.get_text_config(decoder=True)
    module = second_tree(owner)
    use_latents(module)
    if experts is not None:
        set_experts(module, experts)
    set_attention(module, OBSERVE)
    with plain():
        layers, logits = _observe(module, config.num_hidden_layers)
    set_attention(module, RUN)
    compiled = compile_as(module, owner, model)
    fusion = None
    if fuse and not compiled:  # a compiler fuses by itself
        last = config.max_position_embeddings - 1
        fusion = fuse_tree(module, lambda: _forward(module, Rehearsal(), last), layers[0].kv_dtype)
    return TransformersModel(
        module,
        owner,
        layers,
        vocab_size=logits.shape[-1],
        max_seq_len=config.max_position_embeddings,
        eos_token_ids=_eos_token_ids(owner),
        fusion=fusion,
        notes=tuple(
            filter(None, (latent_note(module), experts and f"experts: {experts}", compiled))
        ),
    )


class TransformersModel:
    """Meets `contract.StepModel`. Made by `adapt`.

    `module` is the tree that runs: it shares every parameter and buffer with the owner's model,
    so weights updated in place are seen.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        owner: PreTrainedModel,
        layers: tuple[ObservedLayer, ...],
        *,
        vocab_size: int,
        max_seq_len: int,
        eos_token_ids: tuple[int, ...],
        fusion: Fusion | None,
        notes: tuple[str, ...],
    ) -> None:
        self.module, self.owner, self.fusion = module, owner, fusion
        self.attention_layers = tuple(layer.spec for layer in layers)
        self.vocab_size = vocab_size
        self.max_seq_len = max_seq_len
        self.eos_token_ids = eos_token_ids
        # what runs otherwise than in the owner's model
        self.notes = (*notes, *(() if fusion is None else fusion.notes))
        self.dtype = layers[0].kv_dtype
        self.device = layers[0].device
        self._expected = {x.layer_idx: (i, x) for i, x in enumerate(layers)}
        # Any 2-D mask keeps transformers from looking for packed sequences, which reads a device
        # value; its content is not used.
        self._mask = torch.ones(1, 1, dtype=torch.bool, device=self.device)
        name_layers(module)

    def follow_owner(self) -> None:
        """Run over the parameters and buffers that the owner's model has now."""
        follow(self.module, self.owner)
        if self.fusion is not None:
            self.fusion.join()

    def __call__(self, step: ModelStep) -> Tensor:
        """Logits [L, vocab_size] of the places `step.logits_token`.

        Offers "hidden", as transformers hands it to its own MTP modules.
        """
        output = self.module(
            input_ids=step.input_ids.unsqueeze(0),
            position_ids=step.positions.unsqueeze(0),
            attention_mask=self._mask.expand(1, step.input_ids.shape[0]),
            use_cache=False,
            logits_to_keep=step.logits_token,
            output_hidden_states=-1,
            return_dict=True,
            graphattn_caller=Runner(step, self._expected),
        )
        step.features["hidden"] = output.hidden_states[-1][0]
        logits: Tensor = output.logits[0]
        return logits


@dataclass(frozen=True, slots=True)
class Runner:
    """Hands the calls of one forward to a step."""

    step: ModelStep
    expected: Mapping[int, tuple[int, ObservedLayer]]  # by layer_idx

    def attend(self, call: Call) -> Tensor:
        """See `Caller`."""
        layer, observed = self.expected[call.layer_idx]
        geometry = observed.geometry
        if call.geometry != geometry:
            raise UnsupportedModelError(
                f"layer {call.layer_idx} changed its attention since it was captured: "
                f"was {geometry}, is {call.geometry}"
            )
        _follow_sinks(observed, call.sinks)
        if geometry.is_latent:
            return self.step.attend_latent(layer, call.q, call.k.squeeze(1))
        return self.step.attend(layer, call.q, call.k, call.v)

    def attend_rotated(
        self,
        layer_idx: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotation: Rotation,
        sinks: Tensor | None,
    ) -> Tensor:
        """See `FusedCaller`."""
        layer, observed = self.expected[layer_idx]
        _follow_sinks(observed, sinks)
        return self.step.attend_rotated(layer, q, k, v, rotation)

    def write_latent(
        self, layer_idx: int, latent: Tensor, rotation: Rotation, query: LowRank | None
    ) -> None:
        """See `FusedCaller`."""
        self.step.write_latent(self.expected[layer_idx][0], latent, rotation, query)

    def attend_written(self, layer_idx: int, q: Tensor, up: Tensor) -> Tensor:
        """See `FusedCaller`."""
        return self.step.attend_written(self.expected[layer_idx][0], q, up)


def _follow_sinks(observed: ObservedLayer, sinks: Tensor | None) -> None:
    """In the graph: they may be trained on."""
    if observed.spec.sinks is not None:
        assert sinks is not None, "the geometry is as observed"
        observed.spec.sinks.copy_(sinks.detach())


class Observer:
    """Keeps the calls of one forward; their result is zero."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def attend(self, call: Call) -> Tensor:
        """See `FusedCaller`."""
        self.calls.append(call)
        geometry = call.geometry
        return call.q.new_zeros(call.q.shape[0], geometry.num_q_heads, geometry.value_dim)


@dataclass(frozen=True, slots=True)
class ObservedLayer:
    """What one layer asks for."""

    layer_idx: int
    geometry: Geometry
    spec: AttentionLayer
    kv_dtype: torch.dtype
    device: torch.device


def second_tree(model: PreTrainedModel) -> PreTrainedModel:
    """Modules and configuration copied, parameters and buffers shared."""
    shared: dict[int, Any] = {
        id(x): x for x in itertools.chain(model.parameters(), model.buffers())
    }
    shared |= {id(x): x for x in map(compiler_of, model.modules()) if x is not None}
    return copy.deepcopy(model, shared)


def compile_as(module: PreTrainedModel, owner: PreTrainedModel, model: object) -> str | None:
    """Compile our tree where the owner's is compiled, and in its way; says so for reports.

    `model` is the owner, or what `torch.compile(owner)` returned.
    """
    compilers = {path: compiler_of(part) for path, part in owner.named_modules()}
    compilers[""] = compiler_of(model)
    parts = {path: compiler for path, compiler in compilers.items() if compiler is not None}
    for path, compiler in parts.items():
        mine = module.get_submodule(path)
        if uncompiled(mine) is mine:  # a compiled module inside was copied as such
            mine._compiled_call_impl = compiler(mine._call_impl)
    return f"compiled by torch.compile: {len(parts)} modules" if parts else None


def set_attention(module: PreTrainedModel, implementation: str) -> None:
    """Let every part of a tree of ours call this attention function."""
    for config in _configs(module):
        config._attn_implementation = implementation


def set_experts(module: PreTrainedModel, implementation: str) -> None:
    """Let every part of a tree of ours run its experts this way."""
    for config in _configs(module):
        config._experts_implementation = implementation


def _configs(module: PreTrainedModel) -> list[PreTrainedConfig]:
    configs = (getattr(part, "config", None) for part in module.modules())
    return [config for config in configs if isinstance(config, PreTrainedConfig)]


def _forward(module: PreTrainedModel, caller: Caller, last_position: int) -> Any:
    """Two tokens, the second of them at `last_position`, with logits of that one."""
    places = torch.arange(2, device=next(module.parameters()).device).unsqueeze(0)
    return module(
        input_ids=torch.zeros_like(places),
        position_ids=places + (last_position - 1),
        attention_mask=torch.ones_like(places, dtype=torch.bool),
        use_cache=False,
        logits_to_keep=places[0, 1:],
        return_dict=True,
        graphattn_caller=caller,
    )


@torch.no_grad()
def _observe(module: PreTrainedModel, num_layers: int) -> tuple[tuple[ObservedLayer, ...], Tensor]:
    """What each layer asks for, in the order of layers, and logits [1, vocab_size]."""
    observer = Observer()
    try:
        output = _forward(module, observer, last_position=1)
    except UnsupportedModelError as error:
        raise unsupported(module, str(error)) from None
    except Exception as error:
        raise unsupported(
            module, f"its forward failed on two tokens: {type(error).__name__}: {error}"
        ) from error
    layers = sorted(
        (observed_layer(module, call) for call in observer.calls), key=lambda x: x.layer_idx
    )
    if [x.layer_idx for x in layers] != list(range(num_layers)):
        raise unsupported(
            module,
            f"of {num_layers} layers, {len({x.layer_idx for x in layers})} called the attention "
            f"function, {len(layers)} times in all; every layer must, once (shared "
            "layers and attention code of its own are not supported)",
        )
    if output.logits.shape[:2] != (1, 1):
        raise unsupported(module, "its forward ignores logits_to_keep")
    return tuple(layers), output.logits[0]


def observed_layer(module: PreTrainedModel, call: Call) -> ObservedLayer:
    """What a call says of its layer; `UnsupportedModelError` for what cannot be served."""
    geometry, mask = call.geometry, call.mask
    name = f"layer {call.layer_idx}"
    if not isinstance(mask, MaskShape):
        raise unsupported(module, f"{name} builds an attention mask of its own")
    if geometry.window not in (None, mask.window):
        raise unsupported(
            module, f"{name} asks for window {geometry.window} under a mask of {mask.window}"
        )
    if geometry.value_dim != geometry.head_dim and not geometry.is_latent:
        raise unsupported(
            module, f"{name}: keys of size {geometry.head_dim}, values of {geometry.value_dim}"
        )
    biases = [k for k, x in call.options.items() if isinstance(x, Tensor) and k != "position_ids"]
    if biases:
        raise unsupported(module, f"{name} adds to its attention: {', '.join(biases)}")
    spec = AttentionLayer(
        num_q_heads=geometry.num_q_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        scale=geometry.scale,
        softcap=geometry.softcap,
        window=mask.window,
        sinks=None if call.sinks is None else call.sinks.detach().float().clone(),
        value_dim=geometry.value_dim if geometry.is_latent else 0,
        k_scale=_scale(call.k_scale),
        v_scale=_scale(call.v_scale),
    )
    return ObservedLayer(call.layer_idx, geometry, spec, call.k.dtype, call.k.device)


def _scale(scale: Tensor | None) -> Tensor | None:
    """Checkpoints have it as a scalar, or with a dimension for each of the tensor's."""
    return None if scale is None else scale.detach().float().reshape(-1).contiguous()


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Of the generation configuration, which is what `generate` goes by."""
    eos: Any = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)
