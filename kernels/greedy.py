"""Greedy selection on the device: see `ops.greedy`.

    sampled[l] = min { v : logits[l, v] = max(logits[l]) },  -1 on NaN or a maximum of -inf

One program per row walks the vocabulary; each lane keeps its own best, and the lanes meet at
the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import check_contiguous
from .strides import stride_unit

BLOCK = 4096  # logits of one iteration


@triton.jit
def _improve(best, best_id, nan, logit, token):
    """Per lane: the best so far and its id with one more logit; whether a NaN was seen."""
    logit = logit.to(tl.float32)
    better = logit > best  # ties keep the lower id
    best = tl.where(better, logit, best)
    best_id = tl.where(better, token, best_id)
    return best, best_id, nan | (logit != logit).to(tl.int32)


@triton.jit(do_not_specialize=["row_stride", "vocab"])
def _greedy_kernel(
    logits_ptr,
    sampled_ptr,
    row_stride,
    vocab,
    STRIDE_UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_row = tl.program_id(0)
    p_row = logits_ptr + i_row.to(tl.int64) * row_stride * STRIDE_UNIT
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.zeros([BLOCK], tl.int32)
    nan = tl.zeros([BLOCK], tl.int32)

    # Only the last block is masked: a mask of unknown alignment would forbid vector loads.
    whole = vocab // BLOCK * BLOCK
    for first in range(0, whole, BLOCK):
        token = first + tl.arange(0, BLOCK)  # [BLOCK]
        logit = tl.load(p_row + token)
        best, best_id, nan = _improve(best, best_id, nan, logit, token)
    token = whole + tl.arange(0, BLOCK)
    logit = tl.load(p_row + token, mask=token < vocab, other=float("-inf"))
    best, best_id, nan = _improve(best, best_id, nan, logit, token)

    largest = tl.max(best, 0)
    lowest_id = tl.min(tl.where(best == largest, best_id, vocab), 0)
    valid = (tl.max(nan, 0) == 0) & (largest > float("-inf"))
    tl.store(sampled_ptr + i_row, tl.where(valid, lowest_id, -1))


def greedy(logits: Tensor, sampled: Tensor) -> None:
    """Write the index of each row's largest logit, -1 where a row has none.

    logits [L, V] fp32, bf16 or fp16 with a contiguous last dimension and any row stride.
    Raises `ValueError` on other strides.
    """
    check_contiguous(torch.int32, sampled=sampled)
    num_rows, vocab = logits.shape
    if logits.stride(1) != 1:
        raise ValueError(f"logits: wanted a contiguous last dimension, got {logits.stride()}")
    if num_rows == 0:
        return
    unit = stride_unit([logits.stride(0)])
    _greedy_kernel[(num_rows,)](
        logits,
        sampled,
        logits.stride(0) // unit,
        vocab,
        STRIDE_UNIT=unit,
        BLOCK=BLOCK,
        num_warps=8,
    )
