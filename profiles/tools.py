"""`python -m profiles.tools`: what the capture tools cost.

Prints, and appends to profiles/results/tools.jsonl:
  - 1,000 verified steps of the trained miniature with `MTP(1)`, beside the same steps run eagerly
    once: requests come and go, batches cross buckets, everything a step rewrites is spoiled
  - seconds of CPU for the audit of a 30-layer model, both of its runs
Exit code 1 when verification finds a difference or the audit anything; nothing is reported then.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import graphattn
from graphattn.checkup import Checkup
from graphattn.demo import smollm2
from graphattn.rehearse import audit_folder
from profiles.miniature.model import load
from profiles.record import RESULTS, append, context

OPTIONS: dict[str, Any] = {"max_batch": 8, "max_seq_len": 256, "max_tokens": 64}


class Refused(Exception):
    """A check was red: no number of this run is worth printing."""


def verified(steps: int) -> dict[str, Any]:
    """Seconds of `steps` verified steps, and of one eager run of each."""
    eager: list[float] = []

    def timed(program: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            started = time.perf_counter()
            program()
            eager.append(time.perf_counter() - started)

        return run

    model, speculate = load(), graphattn.MTP(1)
    with graphattn.capture(model, prepack=False, speculate=speculate, **OPTIONS) as engine:
        checkup = Checkup(engine._runner, seed=0)
        checkup._programs = {bucket: timed(p) for bucket, p in checkup._programs.items()}
        started = time.perf_counter()
        report = checkup.run(steps)
        seconds = time.perf_counter() - started
    if not report.ok:
        raise Refused(str(report))
    once = sum(eager) / len(eager) * steps  # the first two steps run eagerly twice
    print(f"{steps} verified steps: {seconds:.1f} s, {seconds / once:.2f} times eager", flush=True)
    return {"part": "verify", "steps": steps, "seconds": seconds, "eager_s": once}


def audited() -> dict[str, Any]:
    """Seconds of CPU for the audit of SmolLM2's whole step."""
    started = time.process_time()
    report = audit_folder(smollm2.folder(), torch.bfloat16)
    seconds = time.process_time() - started
    if not report.ok:
        raise Refused(str(report))
    print(f"audit of 30 layers: {seconds:.1f} s of CPU, {report.num_ops} operations", flush=True)
    return {"part": "audit", "cpu_s": seconds, "operations": report.num_ops}


def measure(steps: int) -> Iterator[dict[str, Any]]:
    """Both parts."""
    yield audited()
    yield verified(steps)


def main() -> int:
    """Run both parts; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="to verify")
    parser.add_argument("--no-record", action="store_true", help="print only")
    arguments = parser.parse_args()
    shared = context()
    try:
        records = list(measure(arguments.steps))
    except Refused as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        return 1
    if not arguments.no_record:
        append(RESULTS / "tools.jsonl", shared, records)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
