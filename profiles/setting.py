"""What the benchmarks of one run share: peaks, models, sizes, and when a number is refused."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch

from graphattn.demo import smollm2
from graphattn.text import encode, load
from profiles.interleave import Pairs
from profiles.miniature.model import CHECKPOINT
from profiles.peaks import Peaks, measure_peaks
from profiles.record import Record, spread
from profiles.roofline import Sizes, Stages, achieved, sizes

T = TypeVar("T")
PAIRS = 30  # of steps, for a comparison of its own; a point of a sweep has fewer


class Refused(Exception):
    """A check was red: no number of this benchmark is worth printing."""


class Setting:
    """Of one run on a CPU. `dry` runs the same code on tiny random models, within seconds."""

    def __init__(self, *, dry: bool = False) -> None:
        self.dry, self.device = dry, torch.device("cpu")

    def size(self, full: T, dry: T) -> T:
        """The one of the two that this run uses."""
        return dry if self.dry else full

    @cached_property
    def peaks(self) -> Peaks:
        """Of this machine, now."""
        return measure_peaks(self.device, torch.float32, shrink=self.size(1, 64))

    @cached_property
    def smollm2(self) -> Any:
        """SmolLM2-135M, fp32; dry: a random model of as many bytes as matter to nobody."""
        return tiny_llama(256) if self.dry else self._loaded.model

    @cached_property
    def smollm2_sizes(self) -> Sizes:
        """Of `smollm2`."""
        return sizes(self.smollm2)

    def encoded(self, texts: Sequence[str]) -> list[list[int]]:
        """Prompts for `smollm2`."""
        if self.dry:
            return [list(text.encode())[:48] for text in texts]
        return encode(self._loaded.tokenizer, texts)

    @cached_property
    def miniature(self) -> Any:
        """The trained model of profiles/miniature."""
        return load(CHECKPOINT, self.device).model

    @cached_property
    def _loaded(self) -> Any:
        return load(smollm2.folder(), self.device)

    def check(self, pairs: Pairs, what: str, *, least: int = PAIRS) -> None:
        """Refuse when a token differs or too few pairs were taken."""
        if pairs.our_tokens != pairs.their_tokens:
            raise Refused(f"{what}: tokens differ: {pairs.our_tokens} and {pairs.their_tokens}")
        if len(pairs.ours) < self.size(least, 3):
            raise Refused(f"{what}: only {len(pairs.ours)} pairs")

    def timed(self, seconds: Sequence[float], stages: Stages) -> Record:
        """Fields of a record that times a step: its spread, and its shares of the peaks."""
        taken = spread(seconds)
        return {"ours_s": taken, "roofline": achieved(stages, taken["median"], self.peaks)}

    def compared(self, pairs: Pairs, against: str, stages: Stages) -> Record:
        """Fields of a record that times our step beside another's."""
        ours = self.timed(pairs.ours, stages)
        return ours | {"against": against, "theirs_s": spread(pairs.theirs), "ratio": pairs.ratio}


def tiny_llama(vocab_size: int) -> Any:
    """Random; only its shapes matter."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()
