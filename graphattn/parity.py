"""Are two greedy decodes the same, and if not, is the difference a tie?

Tokens must be equal. Where they first differ, two candidates may be so close that rounding
decides: the gap between the reference's two largest logits is then below what a change of shape
does to a logit. Such a near-tie is named as one, and counted; the demo accepts none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the tokens of one prompt compare with the reference.

    `first_difference` is a position among the emitted tokens; `gap` and `rounding` are the
    reference's top-2 logit gap there and what a change of shape can do to it.
    """

    tokens: int
    first_difference: int | None = None
    gap: float = 0.0
    rounding: float = 0.0

    @property
    def equal(self) -> bool:
        """All tokens agree, and so does their number."""
        return self.first_difference is None

    @property
    def near_tie(self) -> bool:
        """They differ, and rounding can explain it."""
        return not self.equal and self.gap < self.rounding

    def __str__(self) -> str:
        """In a few words."""
        if self.equal:
            return f"equal, {self.tokens} tokens"
        kind = "near-tie" if self.near_tie else "DIFFERENT"
        where = f"token {self.first_difference} of {self.tokens}"
        return f"{kind} at {where}: top-2 gap {self.gap:.1e}, rounding {self.rounding:.1e}"


def compare(
    model: Any, prompt: Sequence[int], reference: Sequence[int], tokens: Sequence[int]
) -> Verdict:
    """Compare the emitted `tokens` with those of `reference` for the same prompt."""
    if list(reference) == list(tokens):
        return Verdict(len(reference))
    pairs = zip(reference, tokens, strict=False)
    shared = min(len(reference), len(tokens))
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), shared)
    gap, rounding = _gap(model, [*prompt, *reference[:first]])
    return Verdict(len(reference), first, gap, rounding)


@torch.inference_mode()
def _gap(model: Any, token_ids: Sequence[int]) -> tuple[float, float]:
    """Top-2 logit gap after `token_ids`, and the rounding of a logit.

    A logit is a sum of `hidden_size` products whose terms went through every layer; errors of
    independent roundings grow with the square root of their number. Both logits move: twice.
    """
    config = model.config.get_text_config()
    ids = torch.tensor([list(token_ids)], device=model.device)
    logits = model(input_ids=ids).logits[0, -1].double()
    top = torch.topk(logits, 2).values
    steps = config.hidden_size * config.num_hidden_layers
    rounding = 2 * steps**0.5 * torch.finfo(model.dtype).eps * float(logits.abs().max())
    return float(top[0] - top[1]), rounding
