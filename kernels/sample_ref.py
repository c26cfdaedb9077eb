"""Oracle of `ops.sample`: one token at a time, Philox in Python's integers.

Penalties and the scale by temperature are fp32 operations of the contract, so they are rounded
after each; everything that sums or takes logarithms is in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

PROMPT = 1 << 30
BELOW_ONE = 1 - 2.0**-24


def sample_ref(
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
    sampled.fill_(0)
    logprob.fill_(0.0)
    for row, slot in enumerate(slot_of_row.tolist()):
        for i in range(int(logits_count[row])):
            place = int(logits_start[row]) + i
            raw = logits[place].tolist()
            if any(math.isnan(value) for value in raw) or max(raw) == -math.inf:
                sampled[place], logprob[place] = -1, math.nan
                continue
            drafts = draft_tokens[slot, :i].tolist()
            x = penalised_ref(
                raw,
                occurrences[slot].tolist(),
                drafts,
                repetition_penalty[slot],
                presence_penalty[slot],
                frequency_penalty[slot],
            )
            if float(temperature[slot]) > 0:
                x = scaled_ref(x, temperature[slot])
                token = draw_ref(
                    x,
                    int(top_k[slot]),
                    float(top_p[slot]),
                    int(seq_len[slot]) + i,
                    (int(seed[slot, 0]), int(seed[slot, 1])),
                ).token
            else:
                token = x.index(max(x))
            sampled[place] = token
            logprob[place] = log_softmax_ref(raw, token)


def penalised_ref(
    logits: list[float],
    occurrences: list[int],
    drafts: list[int],
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> list[float]:
    """Logits after the penalties; the penalties are fp32 scalars."""
    penalised = []
    for token, (logit, occurrence) in enumerate(zip(logits, occurrences, strict=True)):
        emitted = occurrence % PROMPT + drafts.count(token)
        if occurrence >= PROMPT or emitted > 0:
            x = torch.tensor(logit, dtype=torch.float32)
            x = x / repetition if x > 0 else x * repetition
            penalty = frequency * emitted
            logit = float(x - (penalty + presence if emitted > 0 else penalty))
        penalised.append(logit)
    return penalised


def scaled_ref(x: list[float], temperature: Tensor) -> list[float]:
    """(x - max x) * (1 / temperature), 0 for every largest."""
    largest = max(x)
    inverse = 1 / torch.clamp(temperature, min=2.0**-64)  # an fp32 scalar
    difference = torch.tensor(x, dtype=torch.float32) - largest
    scaled = (difference * inverse).tolist()
    return [0.0 if value == largest else s for value, s in zip(x, scaled, strict=True)]


def kept_ref(x: list[float], top_k: int, top_p: float) -> list[int]:
    """Tokens that top-k and then top-p keep."""
    threshold = sorted(x, reverse=True)[min(top_k, len(x)) - 1] if top_k > 0 else -math.inf
    kept = [token for token, value in enumerate(x) if value >= threshold]
    if top_p < 1:
        total = math.fsum(math.exp(x[token]) for token in kept)
        levels = sorted({x[token] for token in kept}, reverse=True)
        for level in levels:
            nucleus = [token for token in kept if x[token] >= level]
            if math.fsum(math.exp(x[token]) for token in nucleus) >= top_p * total:
                return nucleus
    return kept


@dataclass(frozen=True)
class Draw:
    """A drawn token, and by how much it beat the second."""

    token: int
    margin: float


def draw_ref(
    x: list[float], top_k: int, top_p: float, position: int, seed: tuple[int, int]
) -> Draw:
    """The largest x + noise over what is kept; the lowest id on ties."""
    scores = {
        token: x[token] + gumbel_ref(token_word_ref(token, position, seed))
        for token in kept_ref(x, top_k, top_p)
    }
    token = max(scores, key=lambda token: (scores[token], -token))
    others = [score for other, score in scores.items() if other != token]
    return Draw(token, scores[token] - max(others, default=-math.inf))


def gumbel_ref(word: int) -> float:
    """-log(-log(1 - w)), w = (word + 0.5) / 2**32 rounded as the contract says."""
    w = torch.tensor(word, dtype=torch.float64).to(torch.float32)
    w = (w + 0.5) * 2.0**-32
    return -math.log(-math.log1p(-min(float(w), BELOW_ONE)))


def token_word_ref(token: int, position: int, seed: tuple[int, int]) -> int:
    """The random word of a token at a position."""
    key = (seed[0] % 2**32, seed[1] % 2**32)
    return philox_ref((token // 4, position, 0, 0), key)[token % 4]


def philox_ref(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * x0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * x2, 2**32)
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return x0, x1, x2, x3


def log_softmax_ref(logits: list[float], token: int) -> float:
    """Log-probability of a token."""
    largest = max(logits)
    if largest == math.inf:
        return math.nan
    return logits[token] - largest - math.log(math.fsum(math.exp(x - largest) for x in logits))
