"""Decoder layers whose residual sums are one operation with the norm that follows."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from graphattn.models.fusion.matching import (
    Inputs,
    UnfusedError,
    agree,
    check_bypassed,
    check_own,
    has,
)
from graphattn.models.fusion.norms import Norm, add
from graphattn.models.fusion.rehearsal import Rehearsal


class Order(NamedTuple):
    """Names of a layer's norms: before attention, of its result, before the MLP, of its result."""

    before: str
    of_attention: str | None
    between: str
    of_mlp: str | None


_ORDERS = (
    Order("input_layernorm", None, "post_attention_layernorm", None),
    Order(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    Order(
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    ),
)


class Layer:
    """In place of a layer's forward; attention and MLP are those of the module."""

    def __init__(self, module: Any, norms: tuple[Norm | None, ...], following: Norm | None) -> None:
        self._module, self._norms, self._following = module, norms, following

    def __call__(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """[1, T, H] -> [1, T, H]"""
        before, of_attention, between, of_mlp = self._norms
        assert before is not None, "every order has it"
        out = self._module.self_attn(hidden_states=before(hidden_states), **options)[0]
        hidden_states, normed = add(hidden_states, out, of_attention, between)
        out = self._module.mlp(normed)
        out = out[0] if isinstance(out, tuple) else out
        hidden_states, normed = add(hidden_states, out, of_mlp, self._following)
        if self._following is not None:
            self._following.hand(hidden_states, normed)
        return hidden_states


def is_layer(module: nn.Module) -> bool:
    """Whether a module has the parts of a decoder layer."""
    return has(module, "self_attn", "mlp")


def fused_layer(module: nn.Module, inputs: Inputs, following: Norm | None) -> Layer:
    """What computes the same; `UnfusedError` when nothing that we have does.

    Its norms are `Norm`s already where they could be; `following` is the norm that reads its
    result.
    """
    check_own(module)
    want = inputs.call(module, graphattn_caller=Rehearsal())
    if not isinstance(want, Tensor):
        raise UnfusedError(f"{type(module).__name__} returns more than the hidden state")
    for order in _ORDERS:
        names = [name for name in order if name is not None]
        if not has(module, *names) or len(names) != _count_norms(module):
            continue
        norms = tuple(None if name is None else _norm(module, name) for name in order)
        fused = Layer(module, norms, following)
        got = inputs.call(fused, graphattn_caller=Rehearsal())
        if following is not None:
            following.forget()
        if agree(got, want):
            return fused
    raise UnfusedError(f"{type(module).__name__} adds and norms in an order of its own")


def _norm(module: nn.Module, name: str) -> Norm:
    check_bypassed(module.get_submodule(name))
    norm = vars(module.get_submodule(name)).get("forward")
    if not isinstance(norm, Norm):
        raise UnfusedError(f"{name} of {type(module).__name__} is no RMS norm that we have")
    return norm


def _count_norms(module: nn.Module) -> int:
    return sum("norm" in name for name, _ in module.named_children())
