"""Words of Philox and Gumbel noise of both implementations of `sample`."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from graphattn.kernels import noise, sample_cpu
from graphattn.kernels.sample_ref import gumbel_ref, philox_ref, token_word_ref
from tests.kernels.sample_case import GUMBEL_ERROR, TRITON_DEVICE


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
            (0xFFFFFFFF, 0xFFFFFFFF),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    """Of the Random123 distribution."""
    assert philox_ref(counter, key) == words


@triton.jit
def _words_kernel(out_ptr, first, position, seed_low, seed_high, BLOCK: tl.constexpr):
    words = noise.token_words(first, position, seed_low, seed_high, BLOCK)
    tl.store(out_ptr + tl.arange(0, BLOCK), words.to(tl.int32, bitcast=True))


@triton.jit
def _gumbel_kernel(word_ptr, out_ptr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    word = tl.load(word_ptr + lane).to(tl.uint32, bitcast=True)
    tl.store(out_ptr + lane, noise.gumbel(word))


def words_triton(first: int, count: int, position: int, seed: tuple[int, int]) -> list[int]:
    out = torch.zeros(count, dtype=torch.int32, device=TRITON_DEVICE)
    _words_kernel[(1,)](out, first, position, *seed, BLOCK=count)
    return [word % 2**32 for word in out.tolist()]


def words_cpu(first: int, count: int, position: int, seed: tuple[int, int]) -> list[int]:
    token = np.arange(first, first + count)
    return [int(w) for w in sample_cpu.token_words(token, first + count, position, list(seed))]


@pytest.mark.parametrize("words", [words_cpu, words_triton], ids=["cpu", "triton"])
@pytest.mark.parametrize("seed", [(0, 0), (-1, -1), (1, 0), (0, 1), (0x24A0938, -(2**31))], ids=str)
def test_words_are_those_of_philox(
    words: Callable[[int, int, int, tuple[int, int]], list[int]], seed: tuple[int, int]
) -> None:
    for first, position in ((0, 0), (64, 1), (200_000, 2**31 - 1)):
        expected = [token_word_ref(token, position, seed) for token in range(first, first + 64)]
        assert words(first, 64, position, seed) == expected


def test_words_of_few_tokens_are_those_of_all() -> None:
    """A few tokens take another path than a whole vocabulary."""
    vocab, few = 301, np.array([0, 5, 6, 7, 150, 299, 300])
    every = sample_cpu.token_words(np.arange(vocab), vocab, 12, [3, 4])
    assert sample_cpu.token_words(few, vocab, 12, [3, 4]).tolist() == every[few].tolist()


def edge_words() -> list[int]:
    """Both ends, where a power of two changes what fp32 can hold, and some in between."""
    near = [2**bit + d for bit in (1, 9, 22, 23, 24, 25, 26, 31) for d in (-1, 0, 1)]
    ends = [0, *near, 2**32 - 257, 2**32 - 129, 2**32 - 128, 2**32 - 2, 2**32 - 1]
    return ends + [random.Random(0).randrange(2**32) for _ in range(512 - len(ends))]


def gumbel_cpu(words: list[int]) -> list[float]:
    return [float(g) for g in sample_cpu.gumbel(np.array(words, np.uint32))]


def gumbel_triton(words: list[int]) -> list[float]:
    word = torch.tensor(words, dtype=torch.int64).to(torch.int32).to(TRITON_DEVICE)
    out = torch.zeros(len(words), device=TRITON_DEVICE)
    _gumbel_kernel[(1,)](word, out, BLOCK=len(words))
    return list(out.tolist())


@pytest.mark.parametrize("gumbel", [gumbel_cpu, gumbel_triton], ids=["cpu", "triton"])
def test_noise_is_within_its_rounding(gumbel: Callable[[list[int]], list[float]]) -> None:
    """At word 0 it is largest, 22.9; an error there would decide tokens."""
    words = edge_words()
    for word, g in zip(words, gumbel(words), strict=True):
        assert abs(g - gumbel_ref(word)) <= GUMBEL_ERROR, hex(word)
