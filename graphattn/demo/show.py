"""What `graphattn demo` shows, in one run: answers, proof that they are right, and their price."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from graphattn.capturing import capture
from graphattn.demo import smollm2
from graphattn.demo.runs import Run, run_engine, run_generate, run_generate_batch
from graphattn.engine import Engine
from graphattn.parity import compare
from graphattn.request import SamplingParams
from graphattn.text import LineWriter, Loaded, TextStream, encode, load

PROMPTS = (
    "Why is the sky blue?",
    "Explain gravity to a child.",
    "How do bees make honey?",
    "What happened in Rome two thousand years ago?",
    "Write a short story about a lighthouse keeper.",
    "What is photosynthesis, and why does it matter?",
    "Give me advice for learning to play the piano.",
    "Describe the water cycle step by step.",
)
MAX_NEW_TOKENS = 64
MAX_SEQ_LEN = 1024
LINE_WIDTH = 88

Write = Callable[[str], None]


def demo(write: Write) -> bool:
    """Run it; returns whether every token was right and the audit found nothing."""
    write(f"SmolLM2-135M-Instruct on {torch.get_num_threads()} CPU threads, {versions()}")
    with step(write, "loading the model (half a minute the first time)"):
        loaded = load(smollm2.folder(), torch.device("cpu"))
    prompts = encode(loaded.tokenizer, PROMPTS)
    write("\ncapturing one graph per bucket for 8 slots")
    with _capture(loaded, write) as engine:
        write(f"\nanswering {len(PROMPTS)} prompts at once, {MAX_NEW_TOKENS} tokens each at most")
        ours = stream_answers(engine, loaded, prompts, write)
        write("")
        with step(write, "transformers generate, the same prompts in one batch"):
            reference = run_generate(loaded.model, prompts, MAX_NEW_TOKENS)
        equal = show_parity(loaded, prompts, reference, ours, write)
        write("")
        with step(write, "audit: the step on a fake CUDA device"):
            audit = engine.audit()
        write(str(audit))
        write(f"\n{engine.report()}\n")
        continuous = _continuous(loaded, prompts, write)
        again = run_engine(engine, prompts, SamplingParams(MAX_NEW_TOKENS))
    show_throughput(
        {"graphattn": again, "generate": reference, "generate_batch": continuous}, write
    )
    good = equal and not audit.findings and again.token_ids == ours.token_ids
    write("\nall tokens equal, audit clean" if good else "\nNOT EQUAL: see above")
    return good


def versions() -> str:
    """The versions that numbers depend on."""
    import transformers

    return (
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )


@contextmanager
def step(write: Write, what: str) -> Iterator[None]:
    """Say what begins, and how long it took."""
    write(f"{what} ...")
    started = time.perf_counter()
    yield
    write(f"  done in {time.perf_counter() - started:.1f} s")


def stream_answers(
    engine: Engine, loaded: Loaded, prompts: Sequence[Sequence[int]], write: Write
) -> Run:
    """Answer all prompts at once; each line names the prompt that it continues."""
    for i, prompt in enumerate(PROMPTS, 1):
        write(f"  [{i}] {prompt}")
    write("")
    streams = [TextStream(loaded.tokenizer) for _ in prompts]
    lines = [LineWriter(f"  [{i}]", LINE_WIDTH, write) for i, _ in enumerate(prompts, 1)]

    def on_tokens(index: int, token_ids: Sequence[int], finished: bool) -> None:
        lines[index].feed(streams[index].feed(token_ids))
        if finished:
            lines[index].close()

    return run_engine(engine, prompts, SamplingParams(MAX_NEW_TOKENS), on_tokens=on_tokens)


def show_parity(
    loaded: Loaded, prompts: Sequence[Sequence[int]], reference: Run, ours: Run, write: Write
) -> bool:
    """A verdict per prompt; returns whether all are equal."""
    pairs = zip(prompts, reference.token_ids, ours.token_ids, strict=True)
    verdicts = [compare(loaded.model, *pair) for pair in pairs]
    write("tokens against generate:")
    for i, verdict in enumerate(verdicts, 1):
        write(f"  [{i}] {verdict}")
    ties = sum(verdict.near_tie for verdict in verdicts)
    equal = sum(verdict.equal for verdict in verdicts)
    write(f"  {equal} of {len(verdicts)} equal, {ties} near-ties (accepted: 0)")
    return equal == len(verdicts)


def show_throughput(runs: dict[str, Run], write: Write) -> None:
    """One row per runtime. One call each: `make bench` interleaves and takes medians."""
    tokens = sum(map(len, runs["graphattn"].token_ids))
    write(f"\nthroughput, one call each ({tokens} tokens for {len(PROMPTS)} prompts):")
    write(f"  {'':<16}{'ms per decode step':>20}{'tokens/s in all':>18}{'s in all':>10}")
    for name, run in runs.items():
        write(
            f"  {name:<16}{run.median_step * 1e3:>20.1f}"
            f"{run.tokens_per_second:>18.1f}{run.seconds:>10.1f}"
        )


def _capture(loaded: Loaded, write: Write) -> Engine:
    def progress(name: str, done: int, total: int) -> None:
        write(f"  {name}: {done} of {total}")

    return capture(loaded.model, max_batch=len(PROMPTS), max_seq_len=MAX_SEQ_LEN, progress=progress)


def _continuous(loaded: Loaded, prompts: Sequence[Sequence[int]], write: Write) -> Run:
    """`generate_batch`, after a call that warms it."""
    with step(write, "transformers generate_batch, one call to warm it and one to time"):
        run_generate_batch(loaded.model, prompts, 2)
        return run_generate_batch(loaded.model, prompts, MAX_NEW_TOKENS)
