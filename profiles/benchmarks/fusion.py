"""Fused operations of the adapter, beside the same model unfused.

On a CPU, where the linears are the step and packed in both. Nodes of a layer are those of a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import graphattn
from graphattn.layer_nodes import layer_nodes
from profiles.interleave import Pairs, in_turn
from profiles.record import Record
from profiles.roofline import sizes, step_work
from profiles.setting import Setting
from profiles.workloads import DECODE_1, DECODE_8, DRY, Workload


def measure(setting: Setting) -> Iterator[Record]:
    """A record per model and batch, and one of nodes per model."""
    for name, model in (("smollm2", setting.smollm2), ("miniature", setting.miniature)):
        for workload in setting.size((DECODE_1, DECODE_8), (DRY,)):
            yield {"model": name} | steps(setting, model, workload)
        layers = layer_nodes(model)
        counts = ("nodes", "unfused", "experts")
        yield {"model": name} | {count: [getattr(x, count) for x in layers] for count in counts}


def steps(setting: Setting, model: Any, workload: Workload) -> Record:
    """Decode steps in turn."""
    batch = workload.batch
    capture = partial(graphattn.capture, model, batch, max_seq_len=512, buckets=[batch])
    with capture() as ours, capture(fuse=False) as theirs:
        sides = in_turn((ours, theirs), workload)
    pairs = Pairs(sides[0].seconds, sides[1].seconds, sides[0].tokens, sides[1].tokens)
    setting.check(pairs, f"fused, {workload.name}")
    stages = step_work(sizes(model), workload.lengths)
    return {"batch": batch} | setting.compared(pairs, "unfused", stages)
