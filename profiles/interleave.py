"""Pairs of steps, one of ours and one of theirs in turn, so that both meet the same machine.

Timings of a shared machine drift by tens of percent within minutes; the ratio inside a pair does
not. The other runtime calls its model once per step: a hook there runs and times one step of the
engine, and the time between two hooks is the other runtime's step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
    """Alternate decode steps of `engine` with those of `run(model, prompts, new_tokens)`."""
    requests = submit(engine, workload)
    ours: list[float] = []
    theirs: list[float] = []
    with _before_each_decode_step(model, workload.batch, lambda: timed_step(engine), ours, theirs):
        run_theirs = run(
            model, workload.prompts(engine.config.bounds.vocab_size), workload.new_tokens
        )
    pairs = min(len(ours), len(theirs))
    return Pairs(
        tuple(ours[:pairs]),
        tuple(theirs[:pairs]),
        finish(engine, requests),
        run_theirs.token_ids,
    )


def two_engines(first: Engine, second: Engine, workload: Workload) -> Pairs:
    """Alternate decode steps of two engines; `ours` are those of `first`.

    Which of the two goes first changes from pair to pair.
    """
    engines = (first, second)
    requests = [submit(engine, workload) for engine in engines]
    seconds: tuple[list[float], list[float]] = ([], [])
    turn = 0
    while all(engine.busy for engine in engines):
        for index in (turn, 1 - turn):
            seconds[index].append(timed_step(engines[index]))
        turn = 1 - turn
    tokens = [finish(e, r) for e, r in zip(engines, requests, strict=True)]
    return Pairs(tuple(seconds[0]), tuple(seconds[1]), tokens[0], tokens[1])


@contextmanager
def _before_each_decode_step(
    model: Any,
    batch: int,
    our_step: Callable[[], float],
    ours: list[float],
    theirs: list[float],
) -> Iterator[None]:
    """Run `our_step` before each forward of `batch` tokens; the time until the next is theirs."""
    left: float | None = None

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal left
        entered = time.perf_counter()
        if left is not None:
            theirs.append(entered - left)
        left = None
        if kwargs["input_ids"].numel() == batch:
            ours.append(our_step())
            left = time.perf_counter()

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
