"""The decode step of SmolLM2 against the tokens in its context, beside `generate`."""

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

LENGTHS = (64, 256, 1024, 2048)


def measure(setting: Setting) -> Iterator[Record]:
    """A record per length, two rows each; prompts are random and nothing of them is reused."""
    model, lengths = setting.smollm2, setting.size(LENGTHS, (16, 32))
    with graphattn.capture(model, 2, max_seq_len=2 * lengths[-1], prefix_reuse=False) as engine:
        for length in lengths:
            new_tokens = setting.size(16, 8)
            workload = Workload(f"length-{length}", 2, length, new_tokens)
            pairs = against(engine, model, workload, partial(run_generate, ignore_eos=True))
            setting.check(pairs, f"length {length}", least=12)
            stages = step_work(setting.smollm2_sizes, workload.lengths)
            case = {"batch": 2, "length": length}
            yield case | setting.compared(pairs, "generate", stages)
