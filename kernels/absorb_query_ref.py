"""Oracle of `absorb_query`: float64, nothing rounded."""

from __future__ import annotations

import torch
from torch import Tensor

from .rotary_ref import rotate_ref


def absorb_query_ref(
    q: Tensor, up: Tensor, cos: Tensor, sin: Tensor, *, pairs_in: bool, pairs_out: bool
) -> Tensor:
    """Exact q_out [T, Hq, C + R], float64 on the CPU."""
    nope = up.shape[1]
    absorbed = torch.stack(
        [q[:, h, :nope].double().cpu() @ up[h].double().cpu() for h in range(q.shape[1])], 1
    )
    rotated = rotate_ref(q[..., nope:], cos, sin, pairs_in=pairs_in, pairs_out=pairs_out)
    return torch.cat([absorbed, rotated], dim=2)
