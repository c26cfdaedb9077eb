"""What is measured: fixed prompts and lengths, so that numbers of two days can be compared."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """A batch of prompts of random tokens, decoded greedily to a fixed length.

    Every request emits exactly `new_tokens`, end-of-sequence tokens or not, so all runtimes do
    the same work.
    """

    name: str
    batch: int
    prompt_len: int  # tokens of the longest prompt; each next one has one token less
    new_tokens: int

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """The same tokens in every process."""
        draw = random.Random(self.name)
        lengths = [max(1, self.prompt_len - i) for i in range(self.batch)]
        return [[draw.randrange(3, vocab_size) for _ in range(n)] for n in lengths]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row after the decode step in the middle."""
        grown = self.new_tokens // 2
        return [max(1, self.prompt_len - i) + grown for i in range(self.batch)]


DECODE_1 = Workload("decode-1", batch=1, prompt_len=24, new_tokens=42)
DECODE_8 = Workload("decode-8", batch=8, prompt_len=24, new_tokens=42)
BOUNDS_8 = Workload("bounds-8", batch=8, prompt_len=24, new_tokens=42)
DRY = Workload("dry", batch=2, prompt_len=5, new_tokens=8)
