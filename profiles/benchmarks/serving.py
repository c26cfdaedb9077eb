"""The serving loop: the host's own time, shared prefixes, a long prompt beside others, throughput.

Prompts with a common beginning are served with and without prefix reuse, in turn; a long prompt
arrives beside decoding rows, whole and in chunks; requests of mixed lengths are served beside
transformers' `generate_batch`.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

import graphattn
from graphattn.demo.runs import run_engine, run_generate_batch
from graphattn.draft import NGram
from profiles.instant import InstantGraph, TimedStream
from profiles.plain_llama import Shape, plain_llama
from profiles.record import Record, spread
from profiles.roofline import step_work
from profiles.setting import Refused, Setting

HOST_ROWS = 64


def measure(setting: Setting) -> Iterator[Record]:
    """A record per part."""
    yield host_time(setting, None, instant=True)
    yield host_time(setting, NGram(3), instant=True)
    yield host_time(setting, None, instant=False)
    yield prefixes(setting)
    long = setting.size(384, 24)
    yield long_prompt(setting, long, long + 64)
    yield long_prompt(setting, long, setting.size(64, 8))
    yield throughput(setting)


def host_time(setting: Setting, speculate: NGram | None, *, instant: bool) -> Record:
    """Seconds of `step` and `poll` that are neither copy nor replay.

    With an `instant` device rows and slots stay paired, since all requests come at once and none
    ends; torch then has one thread, so that none spins beside the host's.
    """
    threads, steps = torch.get_num_threads(), setting.size(200, 8)
    torch.set_num_threads(1 if instant else threads)
    model = plain_llama(Shape(), max_seq_len=2048, device=setting.device, dtype=torch.float32)
    stream, samples = TimedStream(), []
    options: dict[str, Any] = {"max_seq_len": 2048, "speculate": speculate, "prepack": False}
    with graphattn.capture(model, HOST_ROWS, **options) as engine:
        engine._runner.stream = stream  # not public: nobody else has another device
        if instant:
            graph: Any = InstantGraph(engine._runner)
            engine._runner.graphs = dict.fromkeys(engine._runner.graphs, graph)
        for i in range(HOST_ROWS):
            engine.submit([i, i + 1, i + 2], max_new_tokens=2000)
        for _ in range(steps + 8):
            stream.seconds, started = 0.0, time.perf_counter()
            engine.step()
            engine.poll()
            samples.append(time.perf_counter() - started - stream.seconds)
        emitted = engine.stats().tokens_emitted
    torch.set_num_threads(threads)
    if emitted <= HOST_ROWS * steps:
        raise Refused(f"host time: {emitted} tokens in {steps} steps of {HOST_ROWS} rows")
    return {
        "part": "host",
        "rows": HOST_ROWS,
        "k": 0 if speculate is None else speculate.k,
        "device": "instant" if instant else "this processor",
        "host_s": spread(samples[8:]),
    }


def prefixes(setting: Setting) -> Record:
    """Seconds for eight prompts that share most tokens, with reuse and without."""
    draw, model = random.Random(1), setting.smollm2
    vocab, shared = model.config.vocab_size, setting.size(192, 64)
    options: dict[str, Any] = {"max_batch": 8, "max_seq_len": 512, "max_tokens": 64}
    taken: list[tuple[float, float]] = []
    with (
        graphattn.capture(model, **options) as with_reuse,
        graphattn.capture(model, prefix_reuse=False, **options) as without,
    ):
        for _ in range(2):
            common = [draw.randrange(3, vocab) for _ in range(shared)]
            texts = [[*common, *(draw.randrange(3, vocab) for _ in range(8))] for _ in range(8)]
            params = graphattn.SamplingParams(8, ignore_eos=True)
            a = run_engine(with_reuse, texts, params)
            b = run_engine(without, texts, params)
            if a.token_ids != b.token_ids:
                raise Refused("prefix reuse changed a token")
            taken.append((a.seconds, b.seconds))
        reused = with_reuse.stats().prompt_tokens_reused
    return {
        "part": "prefixes",
        "prompts": 8,
        "shared": shared,
        "prompt_tokens": shared + 8,
        "reused_tokens": reused,
        "call_s": spread([a for a, _ in taken]),
        "theirs_call_s": spread([b for _, b in taken]),
        "ratio": statistics.median(b / a for a, b in taken),
    }


def long_prompt(setting: Setting, length: int, max_tokens: int) -> Record:
    """A prompt of `length` tokens arrives beside four rows that decode, in chunks of what a step
    of `max_tokens` places has left."""
    draw, model = random.Random(2), setting.smollm2
    vocab = model.config.vocab_size
    with graphattn.capture(model, 5, max_seq_len=512, max_tokens=max_tokens) as engine:
        texts = [[draw.randrange(3, vocab) for _ in range(8)] for _ in range(4)]
        decoding = [engine.submit(t, max_new_tokens=48, ignore_eos=True) for t in texts]
        while min(len(r.token_ids) for r in decoding) < 8:
            engine.step()
            engine.poll()
        long = engine.submit([draw.randrange(3, vocab) for _ in range(length)], max_new_tokens=4)
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
        "prompt_tokens": length,
        "max_tokens": max_tokens,
        "first_token_s": first,
        "longest_pause_s": pause,
    }


def throughput(setting: Setting) -> Record:
    """Requests of mixed lengths, eight at a time, beside `generate_batch`."""
    draw, model = random.Random(3), setting.smollm2
    vocab, (least, most), new_tokens = (
        model.config.vocab_size,
        setting.size((8, 96), (2, 9)),
        setting.size(16, 4),
    )
    texts = [
        [draw.randrange(3, vocab) for _ in range(draw.randint(least, most))]
        for _ in range(setting.size(16, 4))
    ]
    params = graphattn.SamplingParams(new_tokens, ignore_eos=True)
    pairs = []
    with graphattn.capture(model, 8, max_seq_len=512, max_tokens=128) as engine:
        for _ in range(1 + 1):  # the first is a warm-up of both
            ours = run_engine(engine, texts, params)
            engine.forget_prefixes()
            theirs = run_generate_batch(model, texts, new_tokens, ignore_eos=True)
            if ours.token_ids != theirs.token_ids:
                raise Refused("generate_batch gave other tokens")
            pairs.append((ours, theirs))
    (ours, theirs), lengths = pairs[-1], [(least + most + new_tokens) // 2] * 8
    return {
        "part": "throughput",
        "requests": len(texts),
        "against": "generate_batch",
        "tokens_per_s": ours.tokens_per_second,
        "theirs_tokens_per_s": theirs.tokens_per_second,
        "ratio": statistics.median(a.tokens_per_second / b.tokens_per_second for a, b in pairs[1:]),
    } | setting.timed(ours.step_seconds, step_work(setting.smollm2_sizes, lengths))
