"""The decode step of SmolLM2 beside transformers' `generate` and `generate_batch`, batch 1 and 8.

Also the share of our step that is spent outside linears.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import graphattn
from graphattn.demo.runs import run_generate, run_generate_batch
from graphattn.engine import Engine
from profiles.interleave import against, submit, timed_step
from profiles.record import Record
from profiles.roofline import step_work
from profiles.setting import Refused, Setting
from profiles.workloads import DECODE_1, DECODE_8, DRY, Workload

PACKED, PLAIN = "mkldnn::_linear_pointwise", ("aten::mm", "aten::addmm")
PROFILED_STEPS = 16
RIVALS: dict[str, Callable[..., Any]] = {
    "generate": run_generate,
    "generate_batch": run_generate_batch,
}


def measure(setting: Setting) -> Iterator[Record]:
    """A record per workload and rival, and one per workload for what is outside linears."""
    model, workloads = setting.smollm2, setting.size((DECODE_1, DECODE_8), (DRY,))
    with graphattn.capture(model, max_batch=8, max_seq_len=512) as engine:
        for workload in workloads:
            stages = step_work(setting.smollm2_sizes, workload.lengths)
            prompts = workload.prompts(engine.config.bounds.vocab_size)
            # setting up generate_batch takes longer than a dry run may
            for rival, run in setting.size(RIVALS, {"generate": run_generate}).items():
                run(model, prompts, 4, ignore_eos=True)
                pairs = against(engine, model, workload, partial(run, ignore_eos=True))
                setting.check(pairs, f"{workload.name} against {rival}")
                yield {"batch": workload.batch} | setting.compared(pairs, rival, stages)
            share = outside_linears(engine, workload)
            yield {"batch": workload.batch, "outside_linears": share}


def outside_linears(engine: Engine, workload: Workload) -> float:
    """Share of the decode step's time that is not spent inside linear layers."""
    requests = submit(engine, workload)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        steps = min(PROFILED_STEPS, workload.new_tokens - 2)
        seconds = sum(timed_step(engine) for _ in range(steps))
    for request in requests:
        engine.cancel(request)
    engine.poll()
    times = {event.key: event.self_cpu_time_total for event in profile.key_averages()}
    # Once linears are packed, what is left of the plain products belongs to the attention.
    linears = times.get(PACKED, 0.0) or sum(times.get(name, 0.0) for name in PLAIN)
    if not linears:
        raise Refused(f"no linear was profiled; the step ran {sorted(times)}")
    return 1 - linears * 1e-6 / seconds
