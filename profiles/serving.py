"""`python -m profiles.serving`: what the serving loop itself costs and brings, in one run.

Prints, and appends to profiles/results/serving.jsonl:
  - host time of a decode step of 64 rows outside copies and graph, without and with drafts
  - prompts with a common beginning, with and without prefix reuse, in turn
  - a long prompt beside decoding rows, whole and in chunks: its time to first token, and the
    longest pause of the others
  - throughput on requests of mixed lengths beside transformers `generate_batch`
Tokens are compared in the same run; when one differs, nothing is reported and the exit code is 1.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import graphattn
from graphattn.demo import smollm2
from graphattn.demo.runs import run_engine, run_generate_batch
from graphattn.draft import NGram
from graphattn.engine import Engine
from graphattn.runner import Runner
from graphattn.sizing import Options, resolve
from graphattn.stream import HostStream
from graphattn.text import load
from profiles.plain_llama import Shape, plain_llama
from profiles.record import RESULTS, append, context, spread

Record = dict[str, Any]
HOST_ROWS, HOST_STEPS = 64, 200
PAIRS = 5


class Refused(Exception):
    """A check was red: no number of this run is worth printing."""


class TimedStream(HostStream):
    """Adds up the time of what a device does elsewhere: copies and replays."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def submit(self, work: Callable[[], object]) -> None:
        """Run and time it."""
        started = time.perf_counter()
        work()
        self.seconds += time.perf_counter() - started

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy and time it."""
        self.submit(lambda: target.copy_(source))


class InstantGraph:
    """Stands for a device: publishes what decode rows emit, one token and each draft's, at once.

    The host's own caches are then as warm as they are beside a GPU, not emptied by the model.
    """

    def __init__(self, runner: Runner) -> None:
        self.inputs, self.output = runner.memory.inputs, runner.memory.output
        self.query_len = runner.config.bounds.decode_query_len

    def replay(self) -> None:
        """Every row emits; so each prompt must fit one step."""
        out, slots = self.output, self.inputs.slot_of_row
        seats = slots.clamp(min=0).long()
        live, given = slots >= 0, self.inputs.admit_generation[seats]
        decodes = (given < 0) & live
        out.generation.copy_(torch.where(given < 0, out.generation, given))
        out.slot.copy_(slots)
        out.count.copy_(torch.where(decodes, self.query_len, live.int()))
        out.logits_count.copy_(out.count)
        out.context_len.add_(torch.where(decodes, self.query_len, self.inputs.query_len))
        out.tokens.fill_(7)

    def close(self) -> None:
        """Nothing is held."""


def host_time(speculate: NGram | None, *, instant: bool) -> Record:
    """Microseconds of `step` and `poll` that are neither copy nor replay.

    With an `instant` device rows and slots stay paired, since all requests come at once and none
    ends; torch then has one thread, so that none spins beside the host's.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if instant else threads)
    shape, device = Shape(), torch.device("cpu")
    model = plain_llama(shape, max_seq_len=2048, device=device, dtype=torch.float32)
    stream = TimedStream()
    options = Options(
        max_batch=HOST_ROWS,
        max_seq_len=2048,
        max_tokens=None,
        page_size=64,
        num_pages=None,
        memory_budget=None,
        buckets=None,
        backend="host",
        run_ahead=2,
        max_queue=4096,
        dcp=None,
        speculate=speculate,
        prefix_reuse=True,
        prepack=False,
    )
    samples = []
    with Engine(model, resolve(options, model), stream) as engine:
        if instant:
            graph: Any = InstantGraph(engine._runner)  # not public: nobody else has another device
            engine._runner.graphs = dict.fromkeys(engine._runner.graphs, graph)
        for i in range(HOST_ROWS):
            engine.submit([i, i + 1, i + 2], max_new_tokens=2000)
        for _ in range(HOST_STEPS + 8):
            stream.seconds, started = 0.0, time.perf_counter()
            engine.step()
            engine.poll()
            samples.append(1e6 * (time.perf_counter() - started - stream.seconds))
        assert engine.stats().tokens_emitted > HOST_ROWS * HOST_STEPS
    torch.set_num_threads(threads)
    return {
        "part": "host_us",
        "rows": HOST_ROWS,
        "drafter": "none" if speculate is None else f"ngram:{speculate.k}",
        "device": "instant" if instant else "this processor",
    } | spread(samples[8:])


def prefixes(model: Any) -> Record:
    """Seconds for eight prompts that share 192 tokens, with reuse over without."""
    draw = random.Random(1)
    vocab = model.config.vocab_size
    ratios, reused = [], 0
    options: dict[str, Any] = {"max_batch": 8, "max_seq_len": 512, "max_tokens": 64}
    with (
        graphattn.capture(model, **options) as with_reuse,
        graphattn.capture(model, prefix_reuse=False, **options) as without,
    ):
        for _ in range(PAIRS):
            common = [draw.randrange(3, vocab) for _ in range(192)]
            texts = [[*common, *(draw.randrange(3, vocab) for _ in range(8))] for _ in range(8)]
            params = graphattn.SamplingParams(8, ignore_eos=True)
            a = run_engine(with_reuse, texts, params)
            b = run_engine(without, texts, params)
            if a.token_ids != b.token_ids:
                raise Refused("prefix reuse changed a token")
            ratios.append(b.seconds / a.seconds)
        reused = with_reuse.stats().prompt_tokens_reused
    return {"part": "prefix_reuse", "prompt_tokens": 200 * 8 * PAIRS, "reused": reused} | spread(
        ratios
    )


def long_prompt(model: Any, max_tokens: int) -> Record:
    """A prompt of 384 tokens arrives beside four rows that decode."""
    draw = random.Random(2)
    vocab = model.config.vocab_size
    with graphattn.capture(model, 5, max_seq_len=512, max_tokens=max_tokens) as engine:
        texts = [[draw.randrange(3, vocab) for _ in range(8)] for _ in range(4)]
        decoding = [engine.submit(t, max_new_tokens=48, ignore_eos=True) for t in texts]
        while min(len(r.token_ids) for r in decoding) < 8:
            engine.step()
            engine.poll()
        long = engine.submit([draw.randrange(3, vocab) for _ in range(384)], max_new_tokens=4)
        arrived = last = time.perf_counter()
        first, pause = 0.0, 0.0
        while not first:
            engine.step()
            events, now = engine.poll(), time.perf_counter()
            if any(event.request in decoding for event in events):
                pause, last = max(pause, now - last), now
            if long.token_ids:
                first = now - arrived
    return {
        "part": "long_prompt",
        "max_tokens": max_tokens,
        "first_token_ms": 1e3 * first,
        "longest_pause_ms": 1e3 * pause,
    }


def throughput(model: Any) -> Record:
    """Sixteen requests of 8 to 96 prompt tokens, 24 tokens each, eight at a time."""
    draw = random.Random(3)
    vocab = model.config.vocab_size
    texts = [[draw.randrange(3, vocab) for _ in range(draw.randint(8, 96))] for _ in range(16)]
    params = graphattn.SamplingParams(24, ignore_eos=True)
    pairs = []
    with graphattn.capture(model, 8, max_seq_len=512, max_tokens=128) as engine:
        for _ in range(2 + 1):  # the first is a warm-up of both
            ours = run_engine(engine, texts, params)
            engine.forget_prefixes()
            theirs = run_generate_batch(model, texts, 24, ignore_eos=True)
            if ours.token_ids != theirs.token_ids:
                raise Refused("generate_batch gave other tokens")
            pairs.append((ours, theirs))
    ours, theirs = pairs[-1]
    return {
        "part": "throughput",
        "tokens_per_s": ours.tokens_per_second,
        "generate_batch_tokens_per_s": theirs.tokens_per_second,
        "ratio": statistics.median(a.tokens_per_second / b.tokens_per_second for a, b in pairs[1:]),
        "median_step_ms": 1e3 * ours.median_step,
    }


def main() -> int:
    """Run every part; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-record", action="store_true", help="print only")
    arguments = parser.parse_args()
    shared = context()
    print(f"machine: {shared['machine']}\nversions: {shared['versions']}\n", flush=True)
    records: list[Record] = []

    def keep(record: Record) -> None:
        records.append(record)
        shown = ((k, f"{v:.4g}" if isinstance(v, float) else v) for k, v in record.items())
        print(", ".join(f"{key} {value}" for key, value in shown), flush=True)

    try:
        for instant in (True, False):
            keep(host_time(None, instant=instant))
            keep(host_time(NGram(3), instant=instant))
        model = load(smollm2.folder(), torch.device("cpu")).model
        keep(prefixes(model))
        keep(long_prompt(model, 448))
        keep(long_prompt(model, 64))
        keep(throughput(model))
    except Refused as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        return 1
    if not arguments.no_record:
        append(RESULTS / "serving.jsonl", shared, records)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
