"""`python -m profiles.speculation`: what prompt lookup brings on text that repeats, in one run.

SmolLM2 continues a list it has begun, with and without `NGram` drafts, in turn. Prints, and appends
to profiles/results/speculation.jsonl: tokens per second as a median ratio over pairs of runs, and
what it is made of: tokens per step, the cost of a step, and acceptance by place. When a single
token differs nothing is reported and the exit code is 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

import graphattn
from graphattn.demo import smollm2
from graphattn.engine import Engine
from graphattn.text import encode, load
from profiles.record import RESULTS, append, context

PROMPT = "Repeat this line ten times, exactly: the quick brown fox jumps over the lazy dog."
NEW_TOKENS, PAIRS, DRAFTS = 64, 3, (3, 5)


@dataclass(frozen=True, slots=True)
class Timed:
    """One request alone: its tokens, seconds, and steps."""

    token_ids: tuple[int, ...]
    seconds: float
    steps: int


def run(engine: Engine, prompt: list[int]) -> Timed:
    """Generate to the fixed length."""
    first, started = engine.stats().steps, time.perf_counter()
    (done,) = engine.generate([prompt], max_new_tokens=NEW_TOKENS, ignore_eos=True)
    return Timed(done.token_ids, time.perf_counter() - started, engine.stats().steps - first)


def main() -> int:
    """Run every number of drafts; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-record", action="store_true", help="print only")
    arguments = parser.parse_args()
    shared = context()
    print(f"machine: {shared['machine']}\nversions: {shared['versions']}\n", flush=True)
    loaded = load(smollm2.folder(), torch.device("cpu"))
    (prompt,) = encode(loaded.tokenizer, [PROMPT])
    options: dict[str, Any] = {"max_batch": 1, "max_seq_len": 256, "max_tokens": 64}
    records = []
    with graphattn.capture(loaded.model, **options) as plain:
        for k in DRAFTS:
            speculate = graphattn.NGram(k)
            with graphattn.capture(loaded.model, speculate=speculate, **options) as drafting:
                run(plain, prompt), run(drafting, prompt)  # caches of both are warm
                pairs = [(run(plain, prompt), run(drafting, prompt)) for _ in range(PAIRS)]
                stats = drafting.stats()
            if any(a.token_ids != b.token_ids for a, b in pairs):
                print(f"refused: NGram({k}) changed a token", file=sys.stderr)
                return 1
            record = {
                "drafter": f"ngram:{k}",
                "pairs": PAIRS,
                "speedup": statistics.median(a.seconds / b.seconds for a, b in pairs),
                "tokens_per_step": NEW_TOKENS / pairs[0][1].steps,
                "step_cost": statistics.median(
                    (b.seconds / b.steps) / (a.seconds / a.steps) for a, b in pairs
                ),
                "plain_tokens_per_s": statistics.median(NEW_TOKENS / a.seconds for a, _ in pairs),
                "accepted_by_place": stats.accepted_by_place,
                "drafted_by_place": stats.drafted_by_place,
            }
            records.append(record)
            print(
                f"NGram({k}): {record['speedup']:.2f} x plain decoding's "
                f"{record['plain_tokens_per_s']:.1f} tokens/s; {record['tokens_per_step']:.2f} "
                f"tokens per step at {record['step_cost']:.2f} x the step's cost; accepted "
                f"{stats.tokens_accepted} of {stats.tokens_drafted}",
                flush=True,
            )
    if not arguments.no_record:
        append(RESULTS / "speculation.jsonl", shared, records)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
