"""`python -m profiles.soak --minutes 10`: random load for as long as you like, every token checked.

The trained miniature with a drafter, a pool that holds less than what runs, requests that arrive,
are cancelled and share beginnings. What each request says alone is computed first. Prints, and
appends to profiles/results/soak.jsonl: throughput, latency percentiles, preemptions, reused tokens,
and the growth of resident memory over the second half. Exit code 1 at the first wrong token, and
when a slot or page is lost.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import graphattn
from graphattn.engine import Engine
from profiles.miniature.model import load
from profiles.miniature.text import held_out_prompts
from profiles.record import RESULTS, append, context

KINDS, BATCH, NEW_TOKENS, PAGES = 96, 8, 48, 36
CANCELLED = 0.01  # of the steps


@dataclass(frozen=True, slots=True)
class Job:
    """A request and what it says when it is alone."""

    prompt: tuple[int, ...]
    params: graphattn.SamplingParams
    token_ids: tuple[int, ...]


def jobs(model: Any) -> list[Job]:
    """Greedy and sampled requests of many lengths; half of them begin alike."""
    draw, texts = random.Random(0), held_out_prompts(KINDS, 96)
    made = []
    with graphattn.capture(model, 1, max_seq_len=256, prefix_reuse=False) as engine:
        for i, text in enumerate(texts):
            start = texts[0][:64] if i % 2 else []
            prompt = (*start, *text[: draw.randint(1, 96)])
            sampled: dict[str, Any] = (
                {"temperature": 0.8, "frequency_penalty": 0.3} if i % 3 else {}
            )
            params = graphattn.SamplingParams(
                draw.randint(1, NEW_TOKENS), seed=i, **(sampled if i % 3 else {})
            )
            (alone,) = engine.generate([prompt], params)
            made.append(Job(prompt, params, alone.token_ids))
    return made


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


class Soak:
    """One engine under load."""

    def __init__(self, engine: Engine, pool: list[Job]) -> None:
        self.engine, self.pool = engine, pool
        self.draw = random.Random(1)
        self.flying: dict[graphattn.Request, tuple[Job, float]] = {}
        self.latencies: list[float] = []
        self.checked = self.wrong = 0

    def run(self, seconds: float) -> list[tuple[float, int]]:
        """Serve for `seconds`; (time, resident bytes) once a second."""
        memory, started = [(0.0, resident())], time.monotonic()
        while (now := time.monotonic() - started) < seconds and not self.wrong:
            self.turn()
            if now - memory[-1][0] > 1:
                memory.append((now, resident()))
        while self.engine.busy:
            self.engine.step()
            self.collect()
        return memory

    def turn(self) -> None:
        """Perhaps new requests, perhaps a cancellation, a step, and what has landed."""
        while len(self.flying) < 2 * BATCH and self.draw.random() < 0.5:
            job = self.draw.choice(self.pool)
            request = self.engine.submit(job.prompt, job.params)
            self.flying[request] = job, time.monotonic()
        if self.flying and self.draw.random() < CANCELLED:
            self.engine.cancel(self.draw.choice(list(self.flying)))
        self.engine.step()
        self.collect()

    def collect(self) -> None:
        """Check what has ended."""
        for event in self.engine.poll():
            if not event.finished:
                continue
            job, submitted = self.flying.pop(event.request)
            said = tuple(event.request.token_ids)
            whole = event.finish_reason is not graphattn.FinishReason.CANCELLED
            if said != (job.token_ids if whole else job.token_ids[: len(said)]):
                self.wrong += 1
                print(f"wrong: {event.request} said {said}, alone {job.token_ids}", flush=True)
            self.checked += 1
            self.latencies.append(time.monotonic() - submitted)


def main() -> int:
    """Run; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--speculate", choices=["none", "ngram", "mtp"], default="mtp")
    parser.add_argument("--no-record", action="store_true", help="print only")
    arguments = parser.parse_args()
    shared, model = context(), load()
    speculate = {
        "none": None,
        "ngram": graphattn.NGram(3),
        "mtp": graphattn.MTP(1),
    }[arguments.speculate]
    pool = jobs(model)
    with graphattn.capture(
        model,
        BATCH,
        max_seq_len=256,
        max_tokens=64,
        page_size=16,
        num_pages=PAGES,
        speculate=speculate,
    ) as engine:
        soak = Soak(engine, pool)
        memory = soak.run(60 * arguments.minutes)
        stats = engine.stats()
    half = [size for when, size in memory if when >= memory[-1][0] / 2]
    low, middle, high = (statistics.quantiles(soak.latencies, n=100)[i - 1] for i in (50, 95, 99))
    record = {
        "minutes": arguments.minutes,
        "drafter": arguments.speculate,
        "num_pages": PAGES,
        "requests": soak.checked,
        "wrong": soak.wrong,
        "tokens_per_s": stats.tokens_emitted / (60 * arguments.minutes),
        "latency_s": {"p50": low, "p95": middle, "p99": high},
        "steps": stats.steps,
        "fallbacks": stats.fallbacks,
        "preemptions": stats.preemptions,
        "prompt_tokens_reused": stats.prompt_tokens_reused,
        "pages_lost": PAGES - stats.pages_free - stats.pages_cached,
        "resident_mib": half[-1] / 2**20,
        "resident_growth_mib": (half[-1] - half[0]) / 2**20,
    }
    print(record, flush=True)
    if not arguments.no_record:
        append(RESULTS / "soak.jsonl", shared, [record])
    return 1 if soak.wrong or record["pages_lost"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
