"""Drafts of transformers' `MtpModel` from scratch: the whole sequence, no cache, no batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel


@torch.no_grad()
def drafts_from_scratch(
    model: PreTrainedModel, mtp: MtpModel, tokens: Sequence[int], k: int
) -> list[int]:
    """The k tokens drafted after `tokens`, of which the last has not been fed to the model.

    Up to the number of modules this is `MtpModel.forward`; beyond it the last one goes on over its
    own inputs and one more place, which pairs its last hidden state with its last draft.
    """
    model_any: Any = model
    fed = torch.tensor([list(tokens[:-1])])
    hidden = model_any(fed, use_cache=False, output_hidden_states=-1).hidden_states[-1]
    ids = torch.tensor([list(tokens[1:])])
    positions = torch.arange(1, len(tokens))[None]
    drafts: list[int] = []
    for i in range(k):
        index = min(i, len(mtp.layers) - 1)
        seen = hidden
        hidden = _forward(mtp, index, seen, ids, positions)
        draft = int(mtp._project_to_logits(hidden[:, -1:]).argmax())
        drafts.append(draft)
        new = torch.tensor([[draft]])
        if i < len(mtp.layers) - 1:  # another module, over the same places
            ids, positions = torch.cat([ids[:, 1:], new], 1), positions + 1
        else:
            hidden = torch.cat([seen, hidden[:, -1:]], 1)
            ids = torch.cat([ids, new], 1)
            positions = torch.cat([positions, positions[:, -1:] + 1], 1)
    return drafts


def _forward(mtp: Any, index: int, hidden: Tensor, ids: Tensor, positions: Tensor) -> Tensor:
    cache = MtpCache(config=mtp.config)
    out: Tensor = mtp.forward_layer(index, hidden, positions, cache, input_ids=ids)
    return out
