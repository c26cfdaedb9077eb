"""`python -m profiles.speculation`: what drafts bring, in one run.

SmolLM2 goes on with a text that repeats itself, and copies one that does not, with prompt lookup
(`NGram`); the miniature continues text
that it has not seen, greedily and sampled, with its own prediction module (`MTP`). Each beside the
same without drafts, in turn. Prints, and appends to profiles/results/speculation.jsonl: tokens per
second as a median ratio over pairs of runs, and what it is made of: how many steps were saved, the
cost of a step, and acceptance by place. When a single token differs nothing is reported and the
exit code is 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import graphattn
from graphattn.demo import smollm2
from graphattn.draft import Speculation
from graphattn.engine import Engine
from graphattn.text import encode, load
from profiles.miniature.model import CHECKPOINT
from profiles.miniature.text import held_out_prompts
from profiles.record import RESULTS, append, context

REPEATS = " ".join(["The quick brown fox jumps over the lazy dog."] * 6)
COPIES = (
    "Copy this text word for word:\nAlice was beginning to get very tired of sitting by her "
    "sister on the bank, and of having nothing to do: once or twice she had peeped into the book "
    "her sister was reading, but it had no pictures or conversations in it."
)
NEW_TOKENS, PAIRS = 64, 3


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, what it continues, and who drafts for it."""

    name: str
    folder: Path
    prompts: Callable[[Any], list[list[int]]]  # of the tokenizer
    temperature: float
    drafters: dict[str, Speculation]


WORKLOADS = {
    "smollm2-repeats": lambda: _smollm2("repeats", REPEATS),
    "smollm2-copies": lambda: _smollm2("copies", COPIES),
    "miniature": lambda: _miniature(0.0),
    "miniature-sampled": lambda: _miniature(0.7),
}


def _smollm2(name: str, prompt: str) -> Workload:
    return Workload(
        f"smollm2, {name}",
        smollm2.folder(),
        lambda tokenizer: encode(tokenizer, [prompt]),
        0.0,
        {f"ngram:{k}": graphattn.NGram(k) for k in (3, 5)},
    )


def _miniature(temperature: float) -> Workload:
    return Workload(
        f"miniature, held-out text, temperature {temperature}",
        CHECKPOINT,
        lambda _: held_out_prompts(8, 48),
        temperature,
        {f"mtp:{k}": graphattn.MTP(k) for k in (1, 2)},
    )


@dataclass(frozen=True, slots=True)
class Timed:
    """All prompts at once: their tokens, seconds, and steps."""

    token_ids: tuple[tuple[int, ...], ...]
    seconds: float
    steps: int


def run(engine: Engine, prompts: list[list[int]], temperature: float) -> Timed:
    """Generate to the fixed length."""
    first, started = engine.stats().steps, time.perf_counter()
    requests = [
        engine.submit(
            prompt,
            max_new_tokens=NEW_TOKENS,
            temperature=temperature,
            seed=i,
            ignore_eos=True,
        )
        for i, prompt in enumerate(prompts)
    ]
    while engine.busy:
        engine.step()
    seconds, steps = time.perf_counter() - started, engine.stats().steps - first
    return Timed(tuple(tuple(r.token_ids) for r in requests), seconds, steps)


def measure(work: Workload) -> Iterator[dict[str, Any]]:
    """One record per drafter. Raises `ValueError` when a drafter changed a token."""
    loaded = load(work.folder, torch.device("cpu"))
    prompts = work.prompts(loaded.tokenizer)
    options: dict[str, Any] = {
        "max_batch": len(prompts),
        "max_seq_len": 256,
        "max_tokens": 64,
        "prefix_reuse": False,
    }
    with graphattn.capture(loaded.model, **options) as plain:
        for name, speculate in work.drafters.items():
            with graphattn.capture(loaded.model, speculate=speculate, **options) as drafting:

                def pair(engine: Engine = drafting) -> tuple[Timed, Timed]:
                    first = run(plain, prompts, work.temperature)
                    return first, run(engine, prompts, work.temperature)

                pair()  # caches of both are warm
                pairs = [pair() for _ in range(PAIRS)]
                stats = drafting.stats()
            if any(a.token_ids != b.token_ids for a, b in pairs):
                raise ValueError(f"{work.name}: {name} changed a token")
            tokens = NEW_TOKENS * len(prompts)
            yield {
                "workload": work.name,
                "drafter": name,
                "batch": len(prompts),
                "pairs": PAIRS,
                "speedup": statistics.median(a.seconds / b.seconds for a, b in pairs),
                "steps_saved": pairs[0][0].steps / pairs[0][1].steps,
                "step_cost": statistics.median(
                    (b.seconds / b.steps) / (a.seconds / a.steps) for a, b in pairs
                ),
                "plain_tokens_per_s": statistics.median(tokens / a.seconds for a, _ in pairs),
                "accepted_by_place": stats.accepted_by_place,
                "drafted_by_place": stats.drafted_by_place,
            }


def shown(record: dict[str, Any]) -> str:
    """In one line."""
    shares = ", ".join(
        f"{a / d:.0%}"
        for a, d in zip(record["accepted_by_place"], record["drafted_by_place"], strict=True)
    )
    return (
        f"{record['workload']}, {record['drafter']}: {record['speedup']:.2f} x plain decoding's "
        f"{record['plain_tokens_per_s']:.1f} tokens/s; {record['steps_saved']:.2f} times fewer "
        f"steps at {record['step_cost']:.2f} x the cost; accepted by place {shares}"
    )


def main() -> int:
    """Run every workload, or those named; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-record", action="store_true", help="print only")
    parser.add_argument("workloads", nargs="*", choices=[[], *WORKLOADS], help="default: all")
    arguments = parser.parse_args()
    shared = context()
    print(f"machine: {shared['machine']}\nversions: {shared['versions']}\n", flush=True)
    records = []
    for name in arguments.workloads or WORKLOADS:
        try:
            for record in measure(WORKLOADS[name]()):
                records.append(record)
                print(shown(record), flush=True)
        except ValueError as error:
            print(f"refused: {error}", file=sys.stderr)
            return 1
    if not arguments.no_record:
        append(RESULTS / "speculation.jsonl", shared, records)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
