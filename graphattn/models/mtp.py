"""The contract of multi-token prediction (MTP) modules, and what meets it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor, device, dtype

from graphattn.errors import UnsupportedModelError
from graphattn.models.contract import AttentionLayer, ModelStep, StepModel

_CONTRACT = (
    "depth",
    "hidden_size",
    "vocab_size",
    "max_seq_len",
    "attention_layers",
    "dtype",
    "device",
)


class MTPOutput(NamedTuple):
    """What a module makes of a step of T places."""

    logits: Tensor  # [L, vocab_size] of the places `step.logits_token`
    hidden: Tensor  # [T, hidden_size] of every place, in the place of the target's hidden state


class MTPModule(Protocol):
    """One module, or a chain of them, that predicts tokens beyond the target's next one.

    At place p of a sequence, module 0 gets the target's hidden state of position p and token
    p + 1, and predicts token p + 2. Module i gets the hidden state of module i - 1 at place p and
    token p + i + 1, and predicts token p + i + 2. The last one can go on by itself, its hidden
    state of place p in the role of its input at place p + 1.

    As for a `StepModel`, weights keep their addresses and a call reads no device value on the host.
    """

    @property
    def depth(self) -> int:
        """Modules in the chain."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width of hidden states, the target's and its own."""
        ...

    @property
    def vocab_size(self) -> int:
        """Width of the logits; the target's."""
        ...

    @property
    def max_seq_len(self) -> int:
        """Longest sequence that its positions allow."""
        ...

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """Of all modules, in the order of the `layer` of `ModelStep.attend`. The KV of place p
        lies at position p."""
        ...

    @property
    def dtype(self) -> dtype:
        """Of K and V, or latents, as the attention receives them."""
        ...

    @property
    def device(self) -> device:
        """Of weights and steps."""
        ...

    def __call__(self, step: ModelStep, hidden: Tensor, index: int) -> MTPOutput:
        """Module `index` over T places.

        `step.input_ids` [T] are the tokens p + index + 1 and `step.positions` [T] are
        p + index + 1, the token's own position, by which transformers rotates; `hidden` is
        [T, hidden_size]. What it computes at a place without a token is ignored.
        """
        ...


def adapt_mtp(module: object | None, target: StepModel) -> MTPModule:
    """The module itself if it meets the contract, else the adapter of a transformers `MtpModel`:
    the one given, or for None that of the target's checkpoint.

    Raises `UnsupportedModelError`, which says what is missing and what to pass.
    """
    missing = [name for name in _CONTRACT if not hasattr(module, name)]
    if not missing and callable(module):
        return module
    owner = getattr(target, "module", None)
    if _of_transformers(owner) and (module is None or _of_transformers(module)):
        from graphattn.models import transformers_mtp

        return transformers_mtp.adapt(module, target)
    if module is None:
        raise UnsupportedModelError(
            "MTP: this model brings no module of its own. Pass MTP(k, module=...) with one that "
            "meets graphattn.models.mtp.MTPModule; see docs/mtp.md."
        )
    raise UnsupportedModelError(
        "module: wanted a transformers MtpModel of a transformers target, or a module that meets "
        f"graphattn.models.mtp.MTPModule, got {type(module).__name__} without "
        f"{', '.join(missing) or '__call__'}. See docs/mtp.md."
    )


def _of_transformers(module: object) -> bool:
    return any(c.__module__.startswith("transformers.") for c in type(module).__mro__)
