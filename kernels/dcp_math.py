"""Context-parallel arithmetic on the device: the formulas of `graphattn.bounds`, for int32 blocks.

Positions and lengths are non-negative: `//` and `%` truncate on a GPU.

    W  ranks     r  this rank     I  interleave
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def local_length(length, W: tl.constexpr, r: tl.constexpr, I: tl.constexpr):
    """How many of the first `length` tokens rank r holds."""
    if W == 1:
        return length
    own = tl.minimum(tl.maximum(length % (W * I) - r * I, 0), I)
    return length // (W * I) * I + own


@triton.jit
def local_position(p, W: tl.constexpr, I: tl.constexpr):
    """Index of position `p` among the entries of its owner."""
    if W == 1:
        return p
    return p // (W * I) * I + p % I


@triton.jit
def owner(p, W: tl.constexpr, I: tl.constexpr):
    """Rank that holds position `p`."""
    return p // I % W
