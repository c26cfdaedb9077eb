"""`python -m profiles.ranges`: what NVTX ranges and counters cost a step while no tool listens.

Prints, and appends to profiles/results/ranges.jsonl, the time of the ranges and counters of one
step over the host's time for a step, for 1 and 64 decoding rows on a device that answers at once.
Both are taken in turn, in one process; what is reported is the median of the ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch

from graphattn._capture import nvtx_ranges
from graphattn.engine import Engine
from graphattn.sizing import Options, resolve
from profiles.plain_llama import Shape, plain_llama
from profiles.record import RESULTS, append, context, spread
from profiles.serving import InstantGraph, TimedStream

ROWS, ROUNDS, STEPS, REPEATS = (1, 64), 40, 50, 2000


def ranges_of_a_step() -> float:
    """Seconds of what the scheduler and `Runner.launch` call for one step. The ranges themselves
    are no call: `within` returned the functions as they were."""
    assert nvtx_ranges.within("copy_in", ranges_of_a_step) is ranges_of_a_step
    started = time.perf_counter()
    for _ in range(REPEATS):
        nvtx_ranges.count("pages_taken", 1)
        nvtx_ranges.count("live_rows", 1)
        nvtx_ranges.enabled()  # before the counters of a step that is read
    return (time.perf_counter() - started) / REPEATS


def empty_loop() -> float:
    """Seconds of one turn of a loop that does nothing."""
    started = time.perf_counter()
    for _ in range(REPEATS):
        pass
    return (time.perf_counter() - started) / REPEATS


def host_step(engine: Engine, stream: TimedStream) -> float:
    """Seconds of `step` and `poll` that are neither copy nor replay."""
    stream.seconds, started = 0.0, time.perf_counter()
    for _ in range(STEPS):
        engine.step()
        engine.poll()
    return (time.perf_counter() - started - stream.seconds) / STEPS


def share(rows: int) -> dict[str, Any]:
    """One record: the share, and both times in microseconds."""
    device, stream = torch.device("cpu"), TimedStream()
    max_seq_len = ROUNDS * STEPS + 8
    model = plain_llama(Shape(), max_seq_len=max_seq_len, device=device, dtype=torch.float32)
    options = Options(
        max_batch=rows,
        max_seq_len=max_seq_len,
        max_tokens=None,
        page_size=64,
        num_pages=None,
        memory_budget=None,
        buckets=[rows],
        backend="host",
        run_ahead=2,
        max_queue=rows,
        dcp=None,
        speculate=None,
        prefix_reuse=True,
        prepack=False,
    )
    steps, costs = [], []
    with Engine(model, resolve(options, model), stream) as engine:
        graph: Any = InstantGraph(engine._runner)  # not public: nobody else has another device
        engine._runner.graphs = dict.fromkeys(engine._runner.graphs, graph)
        for i in range(rows):
            engine.submit([i, i + 1, i + 2], max_new_tokens=max_seq_len - 3)
        for _ in range(ROUNDS):
            costs.append(ranges_of_a_step() - empty_loop())
            steps.append(host_step(engine, stream))
    return {
        "part": "ranges",
        "rows": rows,
        "share": spread([cost / step for cost, step in zip(costs, steps, strict=True)]),
        "ranges_us": 1e6 * statistics.median(costs),
        "step_us": 1e6 * statistics.median(steps),
    }


def main() -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-record", action="store_true", help="print only")
    arguments = parser.parse_args()
    if nvtx_ranges.enabled():
        print("refused: a tool listens to NVTX; run without one", file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    shared = context()
    print(f"machine: {shared['machine']}\nversions: {shared['versions']}\n", flush=True)
    records = []
    for rows in ROWS:
        record = share(rows)
        records.append(record)
        print(
            f"{rows} rows: ranges and counters {record['ranges_us']:.2f} us of a step's "
            f"{record['step_us']:.0f} us on the host, {record['share']['median']:.2%}",
            flush=True,
        )
    if not arguments.no_record:
        append(RESULTS / "ranges.jsonl", shared, records)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
