"""Fused operations in place of what modules of transformers compute, in a tree of ours.

A module is taken for what its parts say, and then held to it: what would replace it must give the
same on random values, within rounding. What does not stays as it is, and the notes say why. Only
forwards are replaced, on instances of our tree; the owner's modules are not touched. Parameters
stay the owner's: see `joined` for what becomes of those of joined linears.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from graphattn.models.fusion.attention import is_attention, rotated_attention
from graphattn.models.fusion.joined import Joined
from graphattn.models.fusion.latent import is_latent_attention, latent_attention
from graphattn.models.fusion.layers import fused_layer, is_layer
from graphattn.models.fusion.matching import Inputs, UnfusedError, noise
from graphattn.models.fusion.mlp import gated_mlp, is_mlp
from graphattn.models.fusion.norms import Norm, formula_of

__all__ = ["Fusion", "fuse"]


class Fusion:
    """What was fused in a tree, and what was not. Made by `fuse`."""

    def __init__(self) -> None:
        self.fused: Counter[str] = Counter()
        self.unfused: Counter[str] = Counter()  # by reason
        self.joined: list[Joined] = []

    @property
    def counts(self) -> dict[str, int]:
        """How often what was fused; of joined linears, how many products there are."""
        together = sum(joined.apart is None and len(joined.linears) > 1 for joined in self.joined)
        return dict(self.fused) | ({"joined linears": together} if together else {})

    @property
    def notes(self) -> tuple[str, ...]:
        """For reports."""
        apart = Counter(joined.apart for joined in self.joined if joined.apart is not None)
        fused = ", ".join(f"{name} {count}" for name, count in self.counts.items())
        reasons = self.unfused + Counter({f"joined linears: {x}": n for x, n in apart.items()})
        return (
            f"fused: {fused or 'nothing'}",
            *(f"not fused: {reason} (x {count})" for reason, count in reasons.items()),
        )

    def join(self) -> None:
        """Move the weights of joined linears together; again after they were exchanged."""
        for joined in self.joined:
            joined.join()


@torch.no_grad()
def fuse(tree: nn.Module, forward: Callable[[], object], dtype: torch.dtype) -> Fusion:
    """Fuse what can be fused in a tree of ours; `forward` runs it once, on two tokens."""
    swaps = _Swaps(tree, _inputs_of(tree, forward), dtype)
    swaps.mlps()
    swaps.attentions()
    swaps.norms()
    swaps.layers()
    swaps.fusion.join()
    return swaps.fusion


class _Swaps:
    """Replaces forwards, from the inside of a tree to the outside."""

    def __init__(
        self, tree: nn.Module, inputs: dict[nn.Module, Inputs], dtype: torch.dtype
    ) -> None:
        self.fusion = Fusion()
        self._tree, self._inputs, self._dtype = tree, inputs, dtype
        self._bypassed: set[nn.Module] = set()  # whose work the forward of another does

    def mlps(self) -> None:
        """Gate, up and activation."""
        for module in list(filter(is_mlp, self._tree.modules())):
            fused = self._swap("gate * up", gated_mlp, module)
            if fused is not None:
                self.fusion.joined.append(fused.joined)

    def attentions(self) -> None:
        """Projections, norms of heads or latents, rotation, write."""
        for module in self._inputs:
            make: Callable[..., Any]
            if is_latent_attention(module):
                name, make = "latent norm + rotation + write", latent_attention
            elif is_attention(module):
                name, make = "rotation + KV write", rotated_attention
            else:
                continue
            fused = self._swap(name, make, module, self._inputs[module], self._dtype)
            if fused is not None:
                self.fusion.joined.append(fused.joined)
                self._bypassed.update(fused.bypassed)

    def norms(self) -> None:
        """Each norm by itself, but those that attention does along the way."""
        for module in self._tree.modules():
            if type(module).__name__.endswith("Norm") and module not in self._bypassed:
                self._swap("norm", _norm, module, self._dtype)

    def layers(self) -> None:
        """Residual sums, with the norms that follow."""
        for module, following in _followed(self._tree):
            if module in self._inputs:
                norm = None if following is None else vars(following).get("forward")
                norm = norm if isinstance(norm, Norm) else None
                self._swap("residual + norm", fused_layer, module, self._inputs[module], norm)

    def _swap(self, name: str, make: Callable[..., Any], module: nn.Module, *given: Any) -> Any:
        """What now runs in place of the module's forward; None where it stays."""
        try:
            fused = make(module, *given)
        except UnfusedError as error:
            self.fusion.unfused[f"{name}: {error}"] += 1
        except Exception as error:  # a module may be anything; it is only left as it is
            reason = f"{type(module).__name__} raised {type(error).__name__}: {error}"
            self.fusion.unfused[f"{name}: {reason}"] += 1
        else:
            module.forward = fused
            self.fusion.fused[name] += 1
            return fused
        return None


def _norm(module: nn.Module, dtype: torch.dtype) -> Norm:
    return Norm(module, formula_of(module, dtype))


def _followed(tree: nn.Module) -> Iterator[tuple[nn.Module, nn.Module | None]]:
    """Each decoder layer, with the norm that reads its result, if it is where it usually is."""
    for parent in tree.modules():
        listed = [x for x in getattr(parent, "layers", ()) if is_layer(x)]
        ends = [getattr(parent, "norm", None)] if listed else []
        firsts = [getattr(x, "input_layernorm", None) for x in listed[1:]]
        yield from zip(listed, [*firsts, *ends], strict=True)
        if isinstance(block := getattr(parent, "mtp_block", None), nn.Module):
            yield block, getattr(parent, "post_norm", None)


def _inputs_of(tree: nn.Module, forward: Callable[[], object]) -> dict[nn.Module, Inputs]:
    """How each layer and attention is called, with noise for its hidden state.

    The noise is small: what a layer adds to it, which does not depend on its size, then counts.
    """
    seen: dict[nn.Module, Inputs] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = Inputs.of(module, args, kwargs)
        hidden = inputs.named["hidden_states"]
        inputs.named["hidden_states"] = noise(hidden, *hidden.shape, scale=2.0**-5)
        seen[module] = inputs

    wanted = [x for x in tree.modules() if is_layer(x) or is_attention(x) or is_latent_attention(x)]
    hooks = [x.register_forward_pre_hook(note, with_kwargs=True) for x in wanted]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    return seen
