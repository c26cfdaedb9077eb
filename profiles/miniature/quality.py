"""`python -m profiles.miniature.quality`: how good the miniature is on unseen text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from profiles.miniature.model import load, load_mtp
from profiles.miniature.text import held_out_ids
from profiles.miniature.train import logits


@dataclass(frozen=True, slots=True)
class Quality:
    """Losses are means in nats per byte.

    `agreement`: share of places where the MTP module, knowing the true next token, ranks the same
    token first as the main model does one place later. Drafts at a place that follows the true text
    are accepted that often by greedy decoding.
    """

    loss: float
    loss_ahead: float
    agreement: float

    def __str__(self) -> str:
        """In one line."""
        return (
            f"held out: loss {self.loss:.3f}, one token ahead {self.loss_ahead:.3f}, "
            f"agreement {self.agreement:.1%}"
        )


@torch.no_grad()
def quality(model: Any, mtp: Any, ids: Tensor) -> Quality:
    """ids [B, N]: pieces of held-out text, each read from its first token."""
    main, ahead = logits(model, mtp, ids)
    return Quality(
        loss=cross_entropy(main[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item(),
        loss_ahead=cross_entropy(ahead[:, :-1].flatten(0, 1), ids[:, 2:].flatten()).item(),
        agreement=(ahead.argmax(-1) == main[:, 1:].argmax(-1)).float().mean().item(),
    )


def pieces(length: int, count: int | None = None) -> Tensor:
    """The first `count` pieces of the held-out text (default: all), [count, length]."""
    ids = torch.tensor(held_out_ids())
    whole = ids[: len(ids) // length * length].view(-1, length)
    return whole[:count]


def main() -> None:
    """Print the quality of the checkpoint over all held-out text."""
    model = load()
    print(quality(model, load_mtp(model), pieces(128)))


if __name__ == "__main__":
    main()
