"""`python -m profiles.speculation`: what prompt lookup brings on text that repeats, in one run.

SmolLM2 goes on with a text that repeats itself, and copies one that does not, with and without
`NGram` drafts, in turn. Prints, and appends to profiles/results/speculation.jsonl: tokens per
second as a median ratio over pairs of runs, and what it is made of: tokens per step, the cost of a
step, and acceptance by place. When a single token differs nothing is reported and the exit code
is 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import graphattn
from graphattn.demo import smollm2
from graphattn.engine import Engine
from graphattn.text import encode, load
from profiles.record import RESULTS, append, context

PROMPTS = {
    "repeats": " ".join(["The quick brown fox jumps over the lazy dog."] * 6),
    "copies": (
        "Copy this text word for word:\nAlice was beginning to get very tired of sitting by her "
        "sister on the bank, and of having nothing to do: once or twice she had peeped into the "
        "book her sister was reading, but it had no pictures or conversations in it."
    ),
}
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


def measure(plain: Engine, drafting: Engine, name: str, prompt: list[int]) -> dict[str, Any] | None:
    """One prompt on both engines in turn; None when a token differs."""
    run(plain, prompt), run(drafting, prompt)  # caches of both are warm
    before = drafting.stats()
    pairs = [(run(plain, prompt), run(drafting, prompt)) for _ in range(PAIRS)]
    stats = drafting.stats()
    if any(a.token_ids != b.token_ids for a, b in pairs):
        return None

    def by_place(now: Sequence[int], then: Sequence[int]) -> list[int]:
        return [a - b for a, b in zip(now, then, strict=True)]

    return {
        "prompt": name,
        "pairs": PAIRS,
        "speedup": statistics.median(a.seconds / b.seconds for a, b in pairs),
        "tokens_per_step": NEW_TOKENS / pairs[0][1].steps,
        "step_cost": statistics.median(
            (b.seconds / b.steps) / (a.seconds / a.steps) for a, b in pairs
        ),
        "plain_tokens_per_s": statistics.median(NEW_TOKENS / a.seconds for a, _ in pairs),
        "accepted_by_place": by_place(stats.accepted_by_place, before.accepted_by_place),
        "drafted_by_place": by_place(stats.drafted_by_place, before.drafted_by_place),
    }


def line(record: dict[str, Any]) -> str:
    """One record in words."""
    return (
        f"{record['drafter']} on a text that {record['prompt']}: {record['speedup']:.2f} x plain "
        f"decoding's {record['plain_tokens_per_s']:.1f} tokens/s; {record['tokens_per_step']:.2f} "
        f"tokens per step at {record['step_cost']:.2f} x the step's cost; accepted "
        f"{sum(record['accepted_by_place'])} of {sum(record['drafted_by_place'])}"
    )


def main() -> int:
    """Run every number of drafts on every prompt; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-record", action="store_true", help="print only")
    arguments = parser.parse_args()
    shared = context()
    print(f"machine: {shared['machine']}\nversions: {shared['versions']}\n", flush=True)
    loaded = load(smollm2.folder(), torch.device("cpu"))
    prompts = dict(zip(PROMPTS, encode(loaded.tokenizer, list(PROMPTS.values())), strict=True))
    options: dict[str, Any] = {"max_batch": 1, "max_seq_len": 256, "max_tokens": 64}
    records = []
    with graphattn.capture(loaded.model, **options) as plain:
        for k in DRAFTS:
            speculate = graphattn.NGram(k)
            with graphattn.capture(loaded.model, speculate=speculate, **options) as drafting:
                for name, prompt in prompts.items():
                    figures = measure(plain, drafting, name, prompt)
                    if figures is None:
                        print(f"refused: NGram({k}) changed a token", file=sys.stderr)
                        return 1
                    records.append({"drafter": f"ngram:{k}"} | figures)
                    print(line(records[-1]), flush=True)
    if not arguments.no_record:
        append(RESULTS / "speculation.jsonl", shared, records)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
