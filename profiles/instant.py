"""A device that answers at once, and a stream that times one: what is left is the host's own."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from graphattn.runner import Runner
from graphattn.stream import HostStream


class TimedStream(HostStream):
    """Adds up the time of what a device does elsewhere: copies and replays."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def submit(self, work: Callable[[], object]) -> None:
        """Run and time it."""
        started = time.perf_counter()
        work()
        self.seconds += time.perf_counter() - started

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy and time it."""
        self.submit(lambda: target.copy_(source))


class InstantGraph:
    """Stands for a device: publishes what decode rows emit, one token and each draft's, at once.

    The host's own caches are then as warm as they are beside a GPU, not emptied by the model.
    """

    def __init__(self, runner: Runner) -> None:
        self.inputs, self.output = runner.memory.inputs, runner.memory.output
        self.query_len = runner.config.bounds.decode_query_len

    def replay(self) -> None:
        """Every row emits; so each prompt must fit one step."""
        out, slots = self.output, self.inputs.slot_of_row
        seats = slots.clamp(min=0).long()
        live, given = slots >= 0, self.inputs.admit_generation[seats]
        decodes = (given < 0) & live
        out.generation.copy_(torch.where(given < 0, out.generation, given))
        out.slot.copy_(slots)
        out.count.copy_(torch.where(decodes, self.query_len, live.int()))
        out.logits_count.copy_(out.count)
        out.context_len.add_(torch.where(decodes, self.query_len, self.inputs.query_len))
        out.tokens.fill_(7)

    def close(self) -> None:
        """Nothing is held."""
