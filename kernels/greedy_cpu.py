"""Greedy selection on the CPU: see `ops.greedy`."""

from __future__ import annotations

import numpy as np
from torch import Tensor


def greedy(logits: Tensor, sampled: Tensor) -> None:
    """Write the index of each row's largest logit, -1 where a row has none."""
    values = logits.float().numpy()  # numpy's argmax is 10 to 20 times as fast as torch's
    index = values.argmax(axis=1)  # the lowest on ties, the first NaN if there is one
    largest = values[np.arange(len(index)), index]
    sampled.numpy()[:] = np.where(largest > -np.inf, index, -1)  # NaN compares false
