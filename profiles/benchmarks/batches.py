"""The decode step of SmolLM2 against the batch, beside `generate`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import graphattn
from graphattn.demo.runs import run_generate
from profiles.interleave import against
from profiles.record import Record
from profiles.roofline import step_work
from profiles.setting import Setting
from profiles.workloads import Workload

BATCHES = (1, 2, 4, 8, 16, 32)


def measure(setting: Setting) -> Iterator[Record]:
    """A record per batch."""
    model, batches = setting.smollm2, setting.size(BATCHES, (1, 3))
    with graphattn.capture(model, batches[-1], max_seq_len=256) as engine:
        for batch in batches:
            new_tokens = setting.size(16, 8)
            workload = Workload(f"batch-{batch}", batch, 24 + batch, new_tokens)
            pairs = against(engine, model, workload, partial(run_generate, ignore_eos=True))
            setting.check(pairs, f"batch {batch}", least=12)
            stages = step_work(setting.smollm2_sizes, workload.lengths)
            yield {"batch": batch} | setting.compared(pairs, "generate", stages)
