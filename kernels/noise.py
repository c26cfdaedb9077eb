"""Gumbel noise on the device, from Philox4x32-10: see `ops.sample`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def token_words(first, position, seed_low, seed_high, BLOCK: tl.constexpr):
    """Random words [BLOCK] uint32 of tokens `first`, `first + 1`, ...; 4 divides `first`.

    position, seed_low and seed_high are int32 scalars.
    """
    key = (seed_high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | seed_low.to(
        tl.uint32, bitcast=True
    ).to(tl.uint64)
    counter = first // 4 + tl.arange(0, BLOCK // 4)
    zero = tl.zeros([BLOCK // 4], tl.int32)
    w0, w1, w2, w3 = tl.philox(key, counter, zero + position, zero, zero)
    # Interleaved twice: the words of a counter belong to four adjacent tokens.
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def gumbel(word):
    """-log(-log(1 - w)) of w = (word + 0.5) / 2**32, at most 1 - 2**-24."""
    w = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    # log1p(-w) = log(u) * w / (1 - u) for the rounded u = 1 - w: the errors of both factors cancel.
    u = 1.0 - w
    lost = u == 1.0
    exponential = tl.where(lost, w, -tl.log(u) * (w / tl.where(lost, 1.0, 1.0 - u)))
    return -tl.log(exponential)
