"""Sampling on the device: see `ops.sample`.

One program per logits place. It walks the vocabulary a few times and never sorts:

    1. NaN, the largest logit, and the greedy token of the penalised logits
    2. the sum of exp(logit - largest), for the log-probability
    if temperature > 0, with the distance d = (max x - x) * (1 / temperature) >= 0 of every token:
    3. top-k: the least threshold with at least k tokens at d <= threshold
    4. top-p: the least threshold with at least top_p of the mass exp(-d) of what top-k keeps
    5. the largest g - d over what is kept

A threshold is searched among the bit patterns of d, which are in the order of the values since d
is not negative: three pivots a walk make 16 walks at most, whatever the logits. Sums add the same
terms in the same order at every pivot, so they are monotone in it, rounding included.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import check_contiguous
from .noise import gumbel, token_words
from .ops import COLDEST, IN_PROMPT
from .strides import stride_unit

BLOCK = 4096  # logits of one iteration


@triton.jit
def _penalised(row, penalties, first, IN_PROMPT: tl.constexpr, BLOCK: tl.constexpr):
    """Logits [BLOCK], -inf past the vocabulary, and their values after the row's penalties."""
    p_logits, vocab = row
    active, p_occurrences, p_drafts, drafts, repetition, presence, frequency = penalties
    token = first + tl.arange(0, BLOCK)
    exists = token < vocab
    logit = tl.load(p_logits + token, mask=exists, other=float("-inf")).to(tl.float32)
    x = logit
    if active:
        occurrence = tl.load(p_occurrences + token, mask=exists, other=0)
        emitted = occurrence % IN_PROMPT
        for i in range(drafts):
            emitted += (token == tl.load(p_drafts + i)).to(tl.int32)
        repeated = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where((occurrence >= IN_PROMPT) | (emitted > 0), repeated, x)
        x -= frequency * emitted.to(tl.float32) + tl.where(emitted > 0, presence, 0.0)
    return logit, x


@triton.jit
def _distance(row, penalties, scale, first, IN_PROMPT: tl.constexpr, BLOCK: tl.constexpr):
    """(max x - x) * (1 / temperature) of a block, 0 at the largest, inf past the vocabulary; and
    its bits, integers in the same order.
    """
    largest, inverse = scale
    x = _penalised(row, penalties, first, IN_PROMPT, BLOCK)[1]
    tie = x == largest
    distance = (tl.where(tie, 0.0, largest) - tl.where(tie, 0.0, x)) * inverse  # no inf - inf
    exists = first + tl.arange(0, BLOCK) < row[1]
    distance = tl.where(exists, distance, float("inf"))
    return distance, distance.to(tl.int32, bitcast=True)


@triton.jit
def _threshold(
    row,
    penalties,
    scale,
    target,
    high,
    BY_MASS: tl.constexpr,
    IN_PROMPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Bits <= high with at least `target` tokens, or mass, up to them, and fewer tokens below."""
    low = -1
    while high - low > 1:
        width = high - low
        pivot1, pivot2, pivot3 = low + width // 4, low + width // 2, high - width // 4
        sum1 = tl.full([BLOCK], 0.0, tl.float32)
        sum2 = sum1
        sum3 = sum1
        for first in range(0, row[1], BLOCK):
            distance, bits = _distance(row, penalties, scale, first, IN_PROMPT, BLOCK)
            weight = tl.exp(-distance) if BY_MASS else 1.0
            sum1 += tl.where(bits <= pivot1, weight, 0.0)
            sum2 += tl.where(bits <= pivot2, weight, 0.0)
            sum3 += tl.where(bits <= pivot3, weight, 0.0)
        measure1, measure2, measure3 = tl.sum(sum1, 0), tl.sum(sum2, 0), tl.sum(sum3, 0)
        # pivot2 is inside, so each walk narrows the range.
        low = tl.where(measure1 < target, pivot1, low)
        low = tl.where(measure2 < target, pivot2, low)
        low = tl.where(measure3 < target, pivot3, low)
        high = tl.where(measure3 >= target, pivot3, high)
        high = tl.where(measure2 >= target, pivot2, high)
        high = tl.where(measure1 >= target, pivot1, high)
        if not BY_MASS:  # exactly the wanted number: no token lies between this and the threshold
            exact = (measure1 == target) | (measure2 == target) | (measure3 == target)
            low = tl.where(exact, high - 1, low)
    return high


@triton.jit
def _mass(row, penalties, scale, high, IN_PROMPT: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of exp(-distance) over the tokens with bits up to `high`."""
    mass = tl.zeros([BLOCK], tl.float32)
    for first in range(0, row[1], BLOCK):
        distance, bits = _distance(row, penalties, scale, first, IN_PROMPT, BLOCK)
        mass += tl.where(bits <= high, tl.exp(-distance), 0.0)
    return tl.sum(mass, 0)


@triton.jit
def _draw(
    row,
    penalties,
    scale,
    high,
    position,
    seed_low,
    seed_high,
    IN_PROMPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Token of the largest noise - distance among those with bits up to `high`."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.zeros([BLOCK], tl.int32)
    for first in range(0, row[1], BLOCK):
        distance, bits = _distance(row, penalties, scale, first, IN_PROMPT, BLOCK)
        kept = bits <= high
        if tl.max(kept.to(tl.int32), 0) > 0:  # after top-k most blocks hold none
            words = token_words(first, position, seed_low, seed_high, BLOCK)
            score = tl.where(kept, gumbel(words) - distance, float("-inf"))
            better = score > best  # ties keep the lower id
            best = tl.where(better, score, best)
            best_id = tl.where(better, first + tl.arange(0, BLOCK), best_id)
    return tl.min(tl.where(best == tl.max(best, 0), best_id, row[1]), 0)


@triton.jit(do_not_specialize=["row_stride", "vocab", "slots", "draft_stride"])
def _sample_kernel(
    logits_ptr,
    slot_of_row_ptr,
    logits_start_ptr,
    logits_count_ptr,
    seq_len_ptr,
    draft_tokens_ptr,
    occurrences_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    repetition_penalty_ptr,
    presence_penalty_ptr,
    frequency_penalty_ptr,
    seed_ptr,
    sampled_ptr,
    logprob_ptr,
    row_stride,  # in units, as vocab is
    vocab,
    slots,
    draft_stride,
    UNIT: tl.constexpr,
    IN_PROMPT: tl.constexpr,
    COLDEST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # The row of a place is the last one that starts at or before it.
    place = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    start = tl.load(logits_start_ptr + rows, mask=rows < slots, other=2147483647)
    i_row = tl.sum((start <= place).to(tl.int32), 0) - 1
    i_draft = place - tl.load(logits_start_ptr + i_row)
    if i_draft >= tl.load(logits_count_ptr + i_row):
        tl.store(sampled_ptr + place, 0)
        tl.store(logprob_ptr + place, 0.0)
        return
    slot = tl.load(slot_of_row_ptr + i_row).to(tl.int64)
    vocab = vocab * UNIT
    row = (logits_ptr + place.to(tl.int64) * row_stride * UNIT, vocab)
    repetition = tl.load(repetition_penalty_ptr + slot)
    presence = tl.load(presence_penalty_ptr + slot)
    frequency = tl.load(frequency_penalty_ptr + slot)
    penalties = (
        (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0),
        occurrences_ptr + slot * vocab,
        draft_tokens_ptr + slot * draft_stride,
        i_draft,
        repetition,
        presence,
        frequency,
    )

    largest_logit = tl.full([BLOCK], float("-inf"), tl.float32)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.zeros([BLOCK], tl.int32)
    nan = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocab, BLOCK):
        logit, x = _penalised(row, penalties, first, IN_PROMPT, BLOCK)
        nan |= (logit != logit).to(tl.int32)
        largest_logit = tl.maximum(largest_logit, logit)
        better = x > best  # ties keep the lower id
        best = tl.where(better, x, best)
        best_id = tl.where(better, first + tl.arange(0, BLOCK), best_id)
    shift = tl.max(largest_logit, 0)
    largest = tl.max(best, 0)
    chosen = tl.min(tl.where(best == largest, best_id, vocab), 0)
    if (tl.max(nan, 0) > 0) | (shift == float("-inf")):
        tl.store(sampled_ptr + place, -1)
        tl.store(logprob_ptr + place, float("nan"))
        return

    shift = tl.where(shift == float("inf"), float("nan"), shift)  # as its log-probability is
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        logit = tl.load(row[0] + token, mask=token < vocab, other=float("-inf"))
        total += tl.exp(logit.to(tl.float32) - shift)

    temperature = tl.load(temperature_ptr + slot)
    if temperature > 0:
        scale = (largest, tl.div_rn(1.0, tl.maximum(temperature, COLDEST)))
        high = 0x7F800000  # the bits of inf: every token
        top_k = tl.load(top_k_ptr + slot)
        if (top_k > 0) & (top_k < vocab):
            target = top_k.to(tl.float32)
            high = _threshold(row, penalties, scale, target, high, False, IN_PROMPT, BLOCK)
        top_p = tl.load(top_p_ptr + slot)
        if top_p < 1:
            target = top_p * _mass(row, penalties, scale, high, IN_PROMPT, BLOCK)
            high = _threshold(row, penalties, scale, target, high, True, IN_PROMPT, BLOCK)
        position = tl.load(seq_len_ptr + slot) + i_draft
        seed_low = tl.load(seed_ptr + 2 * slot)
        seed_high = tl.load(seed_ptr + 2 * slot + 1)
        chosen = _draw(row, penalties, scale, high, position, seed_low, seed_high, IN_PROMPT, BLOCK)

    tl.store(sampled_ptr + place, chosen)
    logit = tl.load(row[0] + chosen).to(tl.float32)
    tl.store(logprob_ptr + place, logit - shift - tl.log(tl.sum(total, 0)))


def sample(
    logits: Tensor,
    slot_of_row: Tensor,
    logits_start: Tensor,
    logits_count: Tensor,
    seq_len: Tensor,
    draft_tokens: Tensor,
    occurrences: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    repetition_penalty: Tensor,
    presence_penalty: Tensor,
    frequency_penalty: Tensor,
    seed: Tensor,
    sampled: Tensor,
    logprob: Tensor,
) -> None:
    """Draw one token for each logits place of the rows; greedy where temperature is 0.

    logits [L, V] fp32, bf16 or fp16 with a contiguous last dimension and any row stride.
    Raises `ValueError` on other strides, and names a tensor of another dtype or not contiguous.
    """
    check_contiguous(
        torch.int32,
        slot_of_row=slot_of_row,
        logits_start=logits_start,
        logits_count=logits_count,
        seq_len=seq_len,
        draft_tokens=draft_tokens,
        occurrences=occurrences,
        top_k=top_k,
        seed=seed,
        sampled=sampled,
    )
    check_contiguous(
        torch.float32,
        temperature=temperature,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logprob=logprob,
    )
    places, vocab = logits.shape
    if logits.stride(1) != 1:
        raise ValueError(f"logits: wanted a contiguous last dimension, got {logits.stride()}")
    if places == 0:
        return
    unit = stride_unit([logits.stride(0), vocab])
    slots = len(slot_of_row)
    _sample_kernel[(places,)](
        logits,
        slot_of_row,
        logits_start,
        logits_count,
        seq_len,
        draft_tokens,
        occurrences,
        temperature,
        top_k,
        top_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        seed,
        sampled,
        logprob,
        logits.stride(0) // unit,
        vocab // unit,
        slots,
        draft_tokens.shape[1],
        UNIT=unit,
        IN_PROMPT=IN_PROMPT,
        COLDEST=COLDEST,
        ROWS=triton.next_power_of_2(slots),
        BLOCK=BLOCK,
        num_warps=16,  # few places: the more threads for each, the better
        enable_fp_fusion=False,  # the contract rounds x after every operation
    )
