"""`python -m profiles.bench`: the decode step of SmolLM2 on this machine, in one run.

Prints, and appends to profiles/results/cpu.jsonl:
  - decode beside transformers `generate` and `generate_batch` at batch 1 and 8
  - the share of the step outside linears
  - step times at max_seq_len 8,192 and 512 with equal lengths, and their work items
Each comparison is a median over interleaved pairs. Tokens are compared in the same run; when a
single one differs, nothing is reported and the exit code is 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import graphattn
from graphattn.demo import smollm2
from graphattn.demo.runs import run_generate, run_generate_batch
from graphattn.engine import Engine
from graphattn.text import load
from profiles.interleave import Pairs, against, submit, timed_step, two_engines
from profiles.record import RESULTS, append, context, spread
from profiles.workloads import BOUNDS_8, DECODE_1, DECODE_8, Workload

MAX_SEQ_LENS = (8192, 512)
PACKED, PLAIN = "mkldnn::_linear_pointwise", ("aten::mm", "aten::addmm")
PROFILED_STEPS = 16

Record = dict[str, Any]


class Refused(Exception):
    """A check was red: no number of this run is worth printing."""


def main() -> int:
    """Run every part; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-record", action="store_true", help="print only")
    arguments = parser.parse_args()
    shared = context()
    print(f"machine: {shared['machine']}\nversions: {shared['versions']}\n", flush=True)
    model = load(smollm2.folder(), torch.device("cpu")).model
    try:
        records = [*decode(model, DECODE_1), *decode(model, DECODE_8), bounds(model)]
    except Refused as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        return 1
    if not arguments.no_record:
        append(RESULTS / "cpu.jsonl", shared, records)
    return 0


def decode(model: Any, workload: Workload) -> list[Record]:
    """Our decode step beside both of transformers' loops, and where its time goes."""
    rivals: dict[str, Callable[..., Any]] = {
        "generate": run_generate,
        "generate_batch": run_generate_batch,
    }
    records = []
    with capture(model, max_seq_len=512) as engine:
        for rival, run in rivals.items():
            run(model, workload.prompts(engine.config.bounds.vocab_size), 4, ignore_eos=True)
            pairs = against(engine, model, workload, partial(run, ignore_eos=True))
            check(pairs, f"{workload.name} against {rival}")
            records.append(compared(workload, rival, pairs))
        share = outside_linears(engine, workload)
    print(f"{workload.name}: {share:.0%} of the step is outside linears\n", flush=True)
    return [*records, {"workload": workload.name, "outside_linears": share}]


def compared(workload: Workload, rival: str, pairs: Pairs) -> Record:
    """Print and return one comparison."""
    ours, theirs = spread(pairs.ours), spread(pairs.theirs)
    sides = [
        f"{name} {s['median'] * 1e3:.1f} ms a step, {workload.batch / s['median']:.0f} tokens/s"
        for name, s in (("graphattn", ours), (rival, theirs))
    ]
    print(
        f"{workload.name}: {'; '.join(sides)}; {pairs.ratio:.2f} times {rival} "
        f"over {len(pairs.ours)} pairs, tokens equal",
        flush=True,
    )
    return {
        "workload": workload.name,
        "against": rival,
        "ours_s": ours,
        "theirs_s": theirs,
        "ratio": pairs.ratio,
    }


def outside_linears(engine: Engine, workload: Workload) -> float:
    """Share of the decode step's time that is not spent inside linear layers."""
    requests = submit(engine, workload)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        seconds = sum(timed_step(engine) for _ in range(PROFILED_STEPS))
    for request in requests:
        engine.cancel(request)
    engine.poll()
    times = {event.key: event.self_cpu_time_total for event in profile.key_averages()}
    # Once linears are packed, what is left of the plain products belongs to the attention.
    linears = times.get(PACKED, 0.0) or sum(times.get(name, 0.0) for name in PLAIN)
    if not linears:
        raise Refused(f"no linear was profiled; the step ran {sorted(times)}")
    return 1 - linears * 1e-6 / seconds


def bounds(model: Any) -> Record:
    """The same requests under two bounds: the same work, in the same time."""
    long, short = MAX_SEQ_LENS
    with capture(model, max_seq_len=long) as first, capture(model, max_seq_len=short) as second:
        pairs = two_engines(first, second, BOUNDS_8)
        check(pairs, BOUNDS_8.name)
        items = [work_items(engine) for engine in (first, second)]
    if items[0] != items[1]:
        raise Refused(f"work items differ: {items[0]} at {long}, {items[1]} at {short}")
    ratio = 1 / pairs.ratio
    print(
        f"bounds: a step at max_seq_len {long} takes {ratio:.3f} times one at {short} "
        f"over {len(pairs.ours)} pairs; work items equal: {items[0]}",
        flush=True,
    )
    return {
        "workload": BOUNDS_8.name,
        "max_seq_lens": MAX_SEQ_LENS,
        "ours_s": spread(pairs.ours),
        "theirs_s": spread(pairs.theirs),
        "ratio": ratio,
        "work_items": items[0],
    }


def work_items(engine: Engine) -> dict[str, list[int]]:
    """Attention work items of the step in the middle of `BOUNDS_8`, by work list."""
    requests = submit(engine, BOUNDS_8)
    for _ in range(BOUNDS_8.new_tokens // 2):
        timed_step(engine)
    # not public: nobody else needs the metadata
    buffers = engine._runner.memory.target.shards[0].buffers
    counts = {name: getattr(buffers, name).tolist() for name in ("decode_count", "prefill_count")}
    for request in requests:
        engine.cancel(request)
    engine.poll()
    return counts


def check(pairs: Pairs, what: str) -> None:
    """Refuse when a token differs or too few pairs were taken."""
    if pairs.our_tokens != pairs.their_tokens:
        raise Refused(f"{what}: tokens differ: {pairs.our_tokens} and {pairs.their_tokens}")
    if len(pairs.ours) < 30:
        raise Refused(f"{what}: only {len(pairs.ours)} pairs")


def capture(model: Any, max_seq_len: int) -> Engine:
    """An engine of 8 slots."""
    return graphattn.capture(model, max_batch=8, max_seq_len=max_seq_len, progress=True)


if __name__ == "__main__":
    raise SystemExit(main())
