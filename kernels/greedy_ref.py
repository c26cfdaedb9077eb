"""Oracle of `ops.greedy`: the largest of a Python list, by comparison."""

from __future__ import annotations

import math

from torch import Tensor


def greedy_ref(logits: Tensor, sampled: Tensor) -> None:
    """Write the index of each row's largest logit, -1 where a row has none."""
    for i, row in enumerate(logits.tolist()):
        best, best_value = -1, -math.inf
        for index, value in enumerate(row):
            if math.isnan(value):
                best = -1
                break
            if value > best_value:
                best, best_value = index, value
        sampled[i] = best
