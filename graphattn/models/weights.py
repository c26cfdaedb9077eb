"""The weights of a captured model: where their owner keeps them, and what has happened to them.

A graph holds addresses. What is written in place it sees at its next replay. What is put elsewhere
it does not see: a parameter that was exchanged for another, or whose `data` was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from graphattn.errors import ConfigError, WeightsMovedError

LOOKS = 16  # steps in which every weight was looked at once


def weights(model: object) -> dict[str, Tensor]:
    """Parameters of a model that is a torch module or has one, by name; they stay in place."""
    module = getattr(model, "module", model)
    return dict(module.named_parameters()) if isinstance(module, nn.Module) else {}


class Held(NamedTuple):
    """A parameter or buffer, in the dictionary of its module."""

    name: str
    holder: dict[str, Any]
    key: str
    tensor: Tensor
    pointer: Callable[[], int]
    address: int  # what `pointer` said at capture


class Weights:
    """Of the models of an engine, by the prefix of their names; made when they are captured.

    `parameters` are those that run, by name. An adapter's `owner` is the module whose user may
    exchange them; a model without one, and without a module, is not watched.
    """

    def __init__(self, models: Mapping[str, object]) -> None:
        self._models = dict(models)
        self.parameters = {
            prefix + name: tensor
            for prefix, model in models.items()
            for name, tensor in weights(model).items()
        }
        self._held = [held for prefix, model in models.items() for held in _held(prefix, model)]
        self._counted = [w for w in self.parameters.values() if not w.is_inference()]
        self._turn = 0

    @property
    def version(self) -> int:
        """Changes when torch counts a write into a parameter. It counts none through `data`, none
        of fused optimizers, and none into tensors of inference mode."""
        return sum([weight._version for weight in self._counted])

    def check(self, *, all: bool) -> None:
        """Raise `WeightsMovedError` when weights lie elsewhere; looks at a part unless `all`.

        Every weight is looked at in `LOOKS` calls.
        """
        self._turn = (self._turn + 1) % LOOKS
        looked_at = self._held if all else self._held[self._turn :: LOOKS]
        if moved := [
            name
            for name, holder, key, tensor, pointer, address in looked_at
            if holder.get(key) is not tensor or pointer() != address
        ]:
            raise WeightsMovedError(
                f"{_listed(moved)}: captured at another address. Graphs hold addresses: update "
                "weights in place (copy_ under torch.no_grad, load_state_dict without assign), or "
                "call engine.recapture(). Nothing was launched."
            )

    def followed(self) -> Weights:
        """The weights as they are now, once every adapter runs what its owner has.

        Raises `ConfigError` when one changed its shape, dtype or device; nothing was changed then.
        """
        for held in self._held:
            new = held.holder.get(held.key)
            if not isinstance(new, Tensor) or _kind(new) != _kind(held.tensor):
                got = _kind(new) if isinstance(new, Tensor) else new
                raise ConfigError(
                    f"{held.name}: wanted {_kind(held.tensor)} as when it was captured, got {got}. "
                    "Capture a new engine."
                )
        for model in self._models.values():
            if hasattr(model, "follow_owner"):
                model.follow_owner()
        return Weights(self._models)


def follow(module: nn.Module, owner: nn.Module) -> None:
    """Let a tree of the same structure hold the parameters and buffers of its owner."""
    for path, part in owner.named_modules():
        mine = module.get_submodule(path)
        mine._parameters.update(part._parameters)
        mine._buffers.update(part._buffers)


def _held(prefix: str, model: object) -> Iterator[Held]:
    owner = getattr(model, "owner", getattr(model, "module", model))
    if not isinstance(owner, nn.Module):
        return
    for path, part in owner.named_modules():
        holders: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for holder in holders:
            for key, tensor in holder.items():
                if tensor is not None:
                    path = path.replace("_orig_mod.", "").removesuffix("_orig_mod")
                    name = f"{prefix}{path}.{key}" if path else prefix + key
                    # the local part, where a tensor is spread over processes
                    pointer = getattr(tensor, "_local_tensor", tensor).data_ptr
                    yield Held(name, holder, key, tensor, pointer, pointer())


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
