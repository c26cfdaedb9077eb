"""The capture tools: `verify` beside the same steps run eagerly once, and the audit.

1,000 steps of the trained miniature with `MTP(1)`: requests come and go, batches cross buckets,
everything a step rewrites is spoiled. The audit is that of SmolLM2's whole step, 30 layers, both of
its runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import graphattn
from graphattn.checkup import Checkup
from graphattn.demo import smollm2
from graphattn.rehearse import audit_folder
from profiles.record import Record
from profiles.setting import Refused, Setting

OPTIONS: dict[str, Any] = {"max_batch": 8, "max_seq_len": 256, "max_tokens": 64}


def measure(setting: Setting) -> Iterator[Record]:
    """Both parts; a dry run has no model to audit."""
    if not setting.dry:
        yield audited()
    yield verified(setting, setting.size(1000, 4))


def verified(setting: Setting, steps: int) -> Record:
    """Seconds of `steps` verified steps, and of one eager run of each."""
    eager: list[float] = []

    def timed(program: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            started = time.perf_counter()
            program()
            eager.append(time.perf_counter() - started)

        return run

    model, speculate = setting.miniature, graphattn.MTP(1)
    with graphattn.capture(model, prepack=False, speculate=speculate, **OPTIONS) as engine:
        checkup = Checkup(engine._runner, seed=0)
        checkup._programs = {bucket: timed(p) for bucket, p in checkup._programs.items()}
        started = time.perf_counter()
        report = checkup.run(steps)
        seconds = time.perf_counter() - started
    if not report.ok:
        raise Refused(str(report))
    once = sum(eager) / len(eager) * steps  # the first two steps run eagerly twice
    return {
        "part": "verify",
        "steps": steps,
        "verify_s": seconds,
        "eager_s": once,
        "times_eager": seconds / once,
    }


def audited() -> Record:
    """Seconds of CPU for the audit of SmolLM2's whole step."""
    started = time.process_time()
    report = audit_folder(smollm2.folder(), torch.bfloat16)
    seconds = time.process_time() - started
    if not report.ok:
        raise Refused(str(report))
    return {"part": "audit", "cpu_s": seconds, "operations": report.num_ops}
