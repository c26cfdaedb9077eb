"""NVTX ranges and counters of a step while no tool listens, beside the host's time for a step.

For 1 and 64 decoding rows, on a device that answers at once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

import graphattn
from graphattn._capture import nvtx_ranges
from graphattn.engine import Engine
from profiles.instant import InstantGraph, TimedStream
from profiles.plain_llama import Shape, plain_llama
from profiles.record import Record, spread
from profiles.setting import Refused, Setting

ROWS, REPEATS = (1, 64), 2000


def measure(setting: Setting) -> Iterator[Record]:
    """A record per number of rows."""
    if nvtx_ranges.listening():
        raise Refused("a profiler listens; run without one")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for rows in ROWS:
        yield share(setting, rows)
    torch.set_num_threads(threads)


def share(setting: Setting, rows: int) -> Record:
    """Both times in turn, in one process; the share is the median of their ratios."""
    rounds, steps = setting.size((40, 50), (3, 5))
    max_seq_len, stream = rounds * steps + 8, TimedStream()
    model = plain_llama(
        Shape(), max_seq_len=max_seq_len, device=setting.device, dtype=torch.float32
    )
    costs, taken = [], []
    with graphattn.capture(model, rows, buckets=[rows], prepack=False) as engine:
        engine._runner.stream = stream  # not public: nobody else has another device
        graph: Any = InstantGraph(engine._runner)
        engine._runner.graphs = dict.fromkeys(engine._runner.graphs, graph)
        for i in range(rows):
            engine.submit([i, i + 1, i + 2], max_new_tokens=max_seq_len - 3)
        for _ in range(rounds):
            costs.append(ranges_of_a_step() - the_same_without())
            taken.append(host_step(engine, stream, steps))
    return {
        "rows": rows,
        "share": statistics.median(cost / step for cost, step in zip(costs, taken, strict=True)),
        "ranges_s": spread(costs),
        "host_s": spread(taken),
    }


def ranges_of_a_step() -> float:
    """Seconds of what the scheduler and `Runner.launch` call for one step."""
    ranged = nvtx_ranges.within("replay.x", nothing)
    started = time.perf_counter()
    for _ in range(REPEATS):
        nvtx_ranges.count("pages_taken", 1)
        nvtx_ranges.count("live_rows", 1)
        ranged(1)  # the replay, and its two copies
        ranged(1)
        ranged(1)
        nvtx_ranges.enabled()  # before the counters of a step that is read
    return (time.perf_counter() - started) / REPEATS


def nothing(argument: int) -> None:
    """What is called within a range."""


def the_same_without() -> float:
    """Seconds of the three calls alone."""
    started = time.perf_counter()
    for _ in range(REPEATS):
        nothing(1)
        nothing(1)
        nothing(1)
    return (time.perf_counter() - started) / REPEATS


def host_step(engine: Engine, stream: TimedStream, steps: int) -> float:
    """Seconds of `step` and `poll` that are neither copy nor replay."""
    stream.seconds, started = 0.0, time.perf_counter()
    for _ in range(steps):
        engine.step()
        engine.poll()
    return (time.perf_counter() - started - stream.seconds) / steps
