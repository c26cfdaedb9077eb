"""Sampling on the CPU: see `ops.sample`.

Greedy places are selected all at once. A place with penalties or a temperature is worked on by
itself: penalties touch only the tokens that occurred, and only tokens that survive top-k and top-p
get noise.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .ops import COLDEST, IN_PROMPT

Floats = NDArray[np.float32]
Tokens = NDArray[np.int64]
Words = NDArray[np.uint32]


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
    """Draw one token for each logits place of the rows; greedy where temperature is 0."""
    values = logits.float()
    raw = values.numpy()
    token = raw.argmax(axis=1)  # [L]; the lowest on ties, the first NaN if there is one
    valid = raw[np.arange(len(token)), token] > -np.inf  # NaN compares false

    # Every logits place of a row: which, of which slot, and its number within the row.
    count = logits_count.numpy()
    row = np.repeat(np.arange(len(count)), count)
    number = np.arange(len(row)) - (np.cumsum(count) - count)[row]
    place = logits_start.numpy()[row] + number
    slot = slot_of_row.numpy()[row]

    repetition, presence, frequency = (
        penalty.numpy()[slot]
        for penalty in (repetition_penalty, presence_penalty, frequency_penalty)
    )
    penalised = (repetition != 1) | (presence != 0) | (frequency != 0)
    heat = temperature.numpy()[slot]
    for i in np.flatnonzero((penalised | (heat > 0)) & valid[place]):
        x = raw[place[i]]
        s = slot[i]
        if penalised[i]:
            drafts = draft_tokens.numpy()[s, : number[i]]
            x = _penalise(
                x, occurrences.numpy()[s], drafts, repetition[i], presence[i], frequency[i]
            )
        if heat[i] > 0:
            x = _scale(x, heat[i])
            kept = _keep(x, int(top_k[s]), float(top_p[s]))
            words = token_words(kept, len(x), int(seq_len[s]) + int(number[i]), seed[s].tolist())
            token[place[i]] = kept[(x[kept] + gumbel(words)).argmax()]
        else:
            token[place[i]] = x.argmax()

    # Twice as fast as `logsumexp` on the CPU.
    chosen = values.log_softmax(1).gather(1, torch.from_numpy(token)[:, None])[:, 0]
    sampled.zero_()
    sampled.numpy()[place] = np.where(valid, token, -1)[place]
    logprob.zero_()
    logprob.numpy()[place] = np.where(valid, chosen.numpy(), np.nan)[place]


def _penalise(
    logits: Floats,
    occurrences: NDArray[np.int32],
    drafts: NDArray[np.int32],
    repetition: np.float32,
    presence: np.float32,
    frequency: np.float32,
) -> Floats:
    """Penalised logits [V] of a place whose row has accepted `drafts` before it."""
    token = np.union1d(np.flatnonzero(occurrences != 0), drafts)
    emitted = (occurrences[token] % IN_PROMPT + (token[:, None] == drafts).sum(1)).astype("f4")
    x = logits[token]
    penalised = logits.copy()
    with np.errstate(over="ignore"):
        x = np.where(x > 0, x / repetition, x * repetition)
        penalised[token] = x - (frequency * emitted + presence * (emitted > 0))
    return penalised


def _scale(x: Floats, temperature: np.float32) -> Floats:
    """(x - max x) * (1 / temperature), 0 for the largest."""
    largest = x.max()
    inverse = np.float32(1) / np.maximum(temperature, np.float32(COLDEST))
    with np.errstate(invalid="ignore", over="ignore"):
        scaled: Floats = x - largest
        scaled *= inverse
    if np.isinf(largest):
        scaled[x == largest] = 0
    return scaled


def _keep(x: Floats, top_k: int, top_p: float) -> Tokens:
    """Tokens, ascending, that top-k and then top-p keep; ties at a threshold stay."""
    threshold = -np.inf
    if 0 < top_k < len(x):
        threshold = np.partition(x, -top_k)[-top_k]
    kept = np.flatnonzero(x >= threshold)
    if top_p < 1:
        descending = np.sort(x[kept])[::-1]
        mass = np.cumsum(np.exp(descending), dtype=np.float64)
        last = np.searchsorted(mass, top_p * mass[-1])  # the first with at least top_p
        kept = kept[x[kept] >= descending[last]]
    return kept


def gumbel(words: NDArray[np.uint32]) -> Floats:
    """-log(-log(1 - w)) of w = (word + 0.5) / 2**32, in fp32."""
    w = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    w = np.minimum(w, np.float32(1 - 2.0**-24))
    # torch's log1p is vectorised, numpy's is not.
    return torch.from_numpy(w).neg_().log1p_().neg_().log_().neg_().numpy()


def token_words(token: Tokens, vocab: int, position: int, seed: list[int]) -> Words:
    """The random word of each of some tokens at one position."""
    few = 4 * len(token) < vocab
    counter = token >> 2 if few else np.arange((vocab + 3) >> 2)
    words = philox(counter, position, *seed).reshape(-1)
    return words[4 * np.arange(len(token)) + (token & 3) if few else token]


def philox(counter: Tokens, position: int, key_low: int, key_high: int) -> Words:
    """Words [n, 4] of Philox4x32-10 at the counters (counter[n], position, 0, 0)."""
    low_word, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    zero: NDArray[np.uint64] = np.zeros(1, np.uint64)
    c0, c1, c2, c3 = counter.astype(np.uint64), zero + np.uint64(position), zero, zero
    for i in range(10):
        product0, product2 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        key0 = np.uint64((key_low + i * 0x9E3779B9) & 0xFFFFFFFF)
        key1 = np.uint64((key_high + i * 0xBB67AE85) & 0xFFFFFFFF)
        c0, c1 = (product2 >> half) ^ c1 ^ key0, product2 & low_word
        c2, c3 = (product0 >> half) ^ c3 ^ key1, product0 & low_word
    return np.stack((c0, c1, c2, c3), axis=1).astype(np.uint32)
