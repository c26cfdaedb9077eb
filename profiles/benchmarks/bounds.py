"""The same requests under bounds of 8,192, 2,048 and 512 tokens: equal work items, equal time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise

import graphattn
from graphattn.engine import Engine
from profiles.interleave import Pairs, in_turn, submit, timed_step
from profiles.record import Record
from profiles.roofline import step_work
from profiles.setting import Refused, Setting
from profiles.workloads import BOUNDS_8, DRY, Workload

MAX_SEQ_LENS = (512, 2048, 8192)


def measure(setting: Setting) -> Iterator[Record]:
    """A record per bound, each beside the smallest."""
    workload, bounds = setting.size((BOUNDS_8, MAX_SEQ_LENS), (DRY, (64, 128)))
    with ExitStack() as stack:
        engines = [
            stack.enter_context(graphattn.capture(setting.smollm2, 8, max_seq_len=bound))
            for bound in bounds
        ]
        sides = in_turn(engines, workload)
        items = [work_items(engine, workload) for engine in engines]
    for (a, of_a), (b, of_b) in pairwise(zip(bounds, items, strict=True)):
        if of_a != of_b:
            raise Refused(f"work items differ: {of_a} at {a}, {of_b} at {b}")
    first, stages = sides[0], step_work(setting.smollm2_sizes, workload.lengths)
    for bound, side in zip(bounds, sides, strict=True):
        pairs = Pairs(side.seconds, first.seconds, side.tokens, first.tokens)
        setting.check(pairs, f"max_seq_len {bound}")
        case = {"batch": workload.batch, "max_seq_len": bound, "work_items": items[0]}
        yield case | setting.compared(pairs, f"max_seq_len {bounds[0]}", stages)


def work_items(engine: Engine, workload: Workload) -> dict[str, list[int]]:
    """Attention work items of a step of the workload, by work list."""
    requests = submit(engine, workload)
    for _ in range(workload.new_tokens // 4):
        timed_step(engine)
    # not public: nobody else needs the metadata
    buffers = engine._runner.memory.target.shards[0].buffers
    counts = {name: getattr(buffers, name).tolist() for name in ("decode_count", "prefill_count")}
    for request in requests:
        engine.cancel(request)
    engine.poll()
    return counts
