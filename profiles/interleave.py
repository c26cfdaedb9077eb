"""Pairs of steps, one of ours and one of theirs in turn, so that both meet the same machine.

Timings of a shared machine drift by tens of percent within minutes; the ratio inside a pair does
not. The other runtime calls its model once per step: a hook there runs and times one step of the
engine, and the time between two hooks is the other runtime's step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from graphattn.demo.runs import Run
from graphattn.engine import Engine
from graphattn.request import Request
from profiles.workloads import Workload

Tokens = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Durations in seconds of alternating steps, and what both sides emitted."""

    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    our_tokens: Tokens
    their_tokens: Tokens

    @property
    def ratio(self) -> float:
        """Median over the pairs of theirs / ours: above 1 is in our favour."""
        pairs = zip(self.ours, self.theirs, strict=True)
        return statistics.median(theirs / ours for ours, theirs in pairs)


@dataclass(frozen=True, slots=True)
class Side:
    """Durations of one engine's steps, and what it emitted."""

    seconds: tuple[float, ...]
    tokens: Tokens


def submit(engine: Engine, workload: Workload) -> list[Request]:
    """Queue the workload and run its prefill: every request has emitted its first token."""
    prompts = workload.prompts(engine.config.bounds.vocab_size)
    requests = [
        engine.submit(prompt, max_new_tokens=workload.new_tokens, ignore_eos=True)
        for prompt in prompts
    ]
    while engine.busy and not all(request.token_ids for request in requests):
        engine.step()
        engine.poll()
    return requests


def timed_step(engine: Engine) -> float:
    """Launch one step and take in its tokens; seconds."""
    started = time.perf_counter()
    engine.step()
    engine.poll()
    return time.perf_counter() - started


def finish(engine: Engine, requests: Sequence[Request]) -> Tokens:
    """Serve the rest; the tokens of each request."""
    while engine.busy:
        timed_step(engine)
    return tuple(tuple(request.token_ids) for request in requests)


def against(
    engine: Engine, model: Any, workload: Workload, run: Callable[[Any, Any, int], Run]
) -> Pairs:
    """Alternate decode steps of `engine` with those of `run(model, prompts, new_tokens)`.

    A hook on the model's forward takes our turn.
    """
    requests, turns = submit(engine, workload), Turns(engine)

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        turns.take(decodes=kwargs["input_ids"].numel() == workload.batch)

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        theirs = run(model, workload.prompts(engine.config.bounds.vocab_size), workload.new_tokens)
    finally:
        handle.remove()
    return turns.pairs(finish(engine, requests), theirs.token_ids)


def in_turn(engines: Sequence[Engine], workload: Workload) -> list[Side]:
    """Alternate decode steps of several engines; which one goes first changes from turn to turn."""
    requests = [submit(engine, workload) for engine in engines]
    seconds: list[list[float]] = [[] for _ in engines]
    turn = 0
    while all(engine.busy for engine in engines):
        for i in range(len(engines)):
            index = (turn + i) % len(engines)
            seconds[index].append(timed_step(engines[index]))
        turn += 1
    tokens = [finish(e, r) for e, r in zip(engines, requests, strict=True)]
    return [Side(tuple(s), t) for s, t in zip(seconds, tokens, strict=True)]


class Turns:
    """Steps of an engine in the gaps of another runtime, which calls `take` between its steps."""

    def __init__(self, engine: Engine) -> None:
        self.ours: list[float] = []
        self.theirs: list[float] = []
        self._engine = engine
        self._left: float | None = None

    def take(self, *, decodes: bool = True) -> None:
        """The time since the last call was a step of theirs; one of ours follows, unless what they
        do next is no decode step."""
        entered = time.perf_counter()
        if self._left is not None:
            self.theirs.append(entered - self._left)
        self._left = None
        if decodes:
            self.ours.append(timed_step(self._engine))
            self._left = time.perf_counter()

    def pairs(self, our_tokens: Tokens, their_tokens: Tokens) -> Pairs:
        """Those in which both had a step."""
        both = min(len(self.ours), len(self.theirs))
        return Pairs(tuple(self.ours[:both]), tuple(self.theirs[:both]), our_tokens, their_tokens)
