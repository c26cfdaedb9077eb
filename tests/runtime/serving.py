"""Ways to run an engine in tests: made with a chosen stream, and driven with checks on the way."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from graphattn.engine import Engine
from graphattn.models import adapt
from graphattn.request import Request
from graphattn.sizing import Options, resolve
from graphattn.stream import HostStream, Stream

DEFAULTS: dict[str, Any] = {
    "max_batch": 4,
    "max_seq_len": None,
    "max_tokens": 16,
    "page_size": 4,
    "num_pages": None,
    "memory_budget": None,
    "buckets": None,
    "backend": "host",
    "run_ahead": 2,
    "max_queue": 1000,
    "prefix_reuse": True,
    "prepack": False,
    "dcp": None,
    "speculate": None,
}


def make_engine(model: object, *, stream: Stream | None = None, **options: Any) -> Engine:
    """`graphattn.capture` with small defaults, and a stream of the test's choice."""
    step_model = adapt(model)
    config = resolve(Options(**(DEFAULTS | options)), step_model)
    return Engine(step_model, config, stream or HostStream())


def prompts(count: int, *, seed: int, longest: int = 40, vocab: int = 61) -> list[list[int]]:
    """Random prompts; lengths from 1 up, short ones more often."""
    rng = random.Random(seed)
    lengths = [1 + int((longest - 1) * rng.random() ** 2) for _ in range(count)]
    return [[rng.randrange(vocab) for _ in range(n)] for n in lengths]


def serve(
    engine: Engine,
    arrivals: Sequence[tuple[Sequence[int], int]],
    *,
    seed: int = 0,
    after_step: Callable[[], None] = lambda: None,
) -> list[Request]:
    """Submit (prompt, max_new_tokens) pairs at random times between steps; drive to the end."""
    rng = random.Random(seed)
    waiting, requests = list(arrivals), []
    streamed: dict[int, list[int]] = {}
    for _ in range(100_000):
        while waiting and rng.random() < 0.3:
            prompt, count = waiting.pop(0)
            requests.append(engine.submit(prompt, max_new_tokens=count))
        launched = engine.step()
        after_step()
        for event in engine.poll():
            streamed.setdefault(event.request.id, []).extend(event.token_ids)
        if not launched and not engine.busy and not waiting:
            break
    assert all(request.finished for request in requests)
    for request in requests:
        assert streamed[request.id] == request.token_ids, "events and request disagree"
    return requests
