"""Which transformers models cannot be served, as far as it shows without running them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from graphattn.errors import UnsupportedModelError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Layer types that keep more of a sequence than KV, alone or beside an attention function.
_RECURRENT = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})


def unsupported(model: object, missing: str) -> UnsupportedModelError:
    """The one shape of a refusal."""
    return UnsupportedModelError(f"{type(model).__name__} cannot be served: {missing}")


def check(model: object) -> PreTrainedModel:
    """The model itself, or `UnsupportedModelError`."""
    if not isinstance(model, PreTrainedModel):
        raise unsupported(model, "it is no PreTrainedModel")
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise unsupported(model, "encoder-decoder models need cross-attention")
    head = model.get_output_embeddings()
    if head is None or not model.can_generate():
        raise unsupported(model, "it has no language-model head; load it as a CausalLM")
    _check_stateless(model, config)
    if getattr(config, "num_kv_shared_layers", 0):
        raise unsupported(model, "layers that share the KV of other layers")
    if getattr(config, "alibi", False):
        raise unsupported(model, "ALiBi position biases")
    if not isinstance(getattr(config, "max_position_embeddings", None), int):
        raise unsupported(model, "its configuration has no max_position_embeddings")
    for name in sorted(_rope_types(model)):
        if "dynamic" in name or name == "longrope":
            raise unsupported(
                model, f"rope type {name!r}: the rotation of one request would depend on the others"
            )
    _check_weights(model)
    return model


def _check_stateless(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Some call our attention function in every layer, and a state-space layer beside it."""
    kinds = sorted(_RECURRENT & set(getattr(config, "layer_types", None) or ()))
    if kinds or model._is_stateful:
        layers = f" (layers of type {', '.join(kinds)})" if kinds else ""
        raise unsupported(
            model,
            f"it keeps recurrent state of each sequence beside its KV{layers}. A model of your own "
            "can: it registers what it keeps of every slot as slot_tensors, see docs/own-model.md",
        )


def _check_weights(model: PreTrainedModel) -> None:
    tensors = list(itertools.chain(model.parameters(), model.buffers()))
    devices = {x.device for x in tensors}
    if len(devices) > 1 or torch.device("meta") in devices:
        names = ", ".join(sorted(map(str, devices)))
        raise unsupported(model, f"weights must lie on one device, these lie on {names}")
    for name, parameter in model.named_parameters():
        if parameter.dtype not in _DTYPES:
            raise unsupported(model, f"quantised weights ({name} is {parameter.dtype})")


def graph_safe_experts(model: PreTrainedModel) -> str | None:
    """The implementation of experts that our tree runs; None without experts to choose for.

    It must not loop over the experts that were hit: the host would have to read which. The owner's
    "batched_mm" stays; all else becomes "grouped_mm", or `UnsupportedModelError` where that is not
    safe.
    """
    if not model._can_set_experts_implementation():
        return None
    kind = getattr(model.config.get_text_config(decoder=True), "_experts_implementation", None)
    if kind == "batched_mm":
        return "batched_mm"
    if model.device.type == "cuda":
        capability = torch.cuda.get_device_capability(model.device)
        if capability < (9, 0) or model.dtype != torch.bfloat16:
            raise unsupported(
                model,
                f"grouped_mm of {model.dtype} on sm_{capability[0]}{capability[1]} reads the "
                "routing on the host (it needs bfloat16 on sm_90 or newer); "
                'model.set_experts_implementation("batched_mm") avoids it, but copies the '
                "weights of every chosen expert for each token: small models only",
            )
    return "grouped_mm"


def _rope_types(model: PreTrainedModel) -> Iterator[str]:
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        yield from kinds.values() if isinstance(kinds, Mapping) else [kinds or "default"]
