"""`python -m profiles.dcp`: what Decode Context Parallelism sends, costs and brings, in one run.

Prints, and appends to profiles/results/dcp.jsonl:
  - collectives and bytes per layer and step of both reductions, counted, beside the formula
  - step time against W on virtual ranks, as a median ratio of interleaved pairs with W = 1
  - KV capacity against W for the same pages per rank
Virtual ranks share one processor: their step time shows the extra work, never a gain.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import graphattn
from graphattn.bounds import ceil_div
from graphattn.engine import Engine
from profiles.record import RESULTS, append, context

LAYERS, HEADS, HEAD_DIM = 4, 8, 32
PAIRS = 40


@dataclass(slots=True)
class Traffic:
    """Collectives of one step, and the bytes that each rank sends in them."""

    calls: list[str] = field(default_factory=list)
    sent: float = 0.0


class CountingGroup(graphattn.VirtualGroup):
    """Virtual ranks that count, with the bytes of ring algorithms, per rank."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.traffic = Traffic()

    def all_gather(self, parts: Sequence[Tensor], gathered: Sequence[Tensor]) -> None:
        """Each rank passes W - 1 parts on."""
        self._count("all_gather", parts, self.size - 1)
        super().all_gather(parts, gathered)

    def all_reduce(self, parts: Sequence[Tensor]) -> None:
        """A reduce-scatter and an all-gather of slices."""
        self._count("all_reduce", parts, 2 * (self.size - 1) / self.size)
        super().all_reduce(parts)

    def all_to_all(self, parts: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """All but the own slice leaves."""
        self._count("all_to_all", parts, (self.size - 1) / self.size)
        super().all_to_all(parts, received)

    def broadcast(self, parts: Sequence[Tensor]) -> None:
        """Of the sampled tokens, once per step; on average (W - 1) / W of a message per rank."""
        self._count("broadcast", parts, (self.size - 1) / self.size)
        super().broadcast(parts)

    def _count(self, call: str, parts: Sequence[Tensor], share: float) -> None:
        self.traffic.calls.append(call)
        self.traffic.sent += parts[0].numel() * parts[0].itemsize * share


def formula(reduce: str, W: int, tokens: int, itemsize: int) -> float:
    """Bytes per rank and layer with replicated heads; see docs/dcp.md."""
    rows, values = tokens * HEADS, tokens * HEADS * HEAD_DIM
    if reduce == "ag_rs":
        return 4 * rows * (W - 1) + 2 * itemsize * values * (W - 1) / W
    rows = W * ceil_div(rows, W)  # rows are padded to equal messages
    message = (itemsize * HEAD_DIM + 4) * rows
    return (message + itemsize * HEAD_DIM * rows) * (W - 1) / W


def tiny_llama() -> LlamaForCausalLM:
    """Random; only its shapes matter here."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    return LlamaForCausalLM(config).eval()


def capture(model: Any, dcp: graphattn.DCP | None, *, backend: str = "host") -> Engine:
    """Eight slots, pages for all of them."""
    return graphattn.capture(
        model, max_batch=8, max_tokens=64, max_seq_len=1024, backend=backend, dcp=dcp
    )


def messages(model: Any, reduce: str, W: int) -> dict[str, Any]:
    """Count one decode step of eight rows and hold it against the formula."""
    group = CountingGroup(W)
    dcp = graphattn.DCP(group, 1, reduce)  # type: ignore[arg-type]
    with capture(model, dcp, backend="eager") as engine:
        bucket = engine.config.buckets.decode[-1]
        group.traffic = Traffic()
        engine.step(bucket)
        traffic = group.traffic
        sampled = 4 * engine.config.bounds.logits_places(bucket.tokens) * (W - 1) / W
        expected = LAYERS * formula(reduce, W, bucket.tokens, model.dtype.itemsize) + sampled
    if traffic.sent != expected:
        raise SystemExit(f"{reduce} W={W}: counted {traffic.sent} bytes, the formula {expected}")
    return {
        "reduce": reduce,
        "W": W,
        "collectives_per_layer": (len(traffic.calls) - 1) / LAYERS,
        "bytes_per_layer": (traffic.sent - sampled) / LAYERS,
        "bytes_per_step": traffic.sent,
    }


def steps(engine: Engine, length: int) -> Callable[[], float]:
    """A timed decode step of eight rows of about `length` tokens."""
    for i in range(8):
        engine.submit([1 + i] * length, max_new_tokens=1024 - length)
    while engine._scheduler.decoding < 8:
        engine.step()
        engine.poll()

    def timed() -> float:
        started = time.perf_counter()
        engine.step()
        engine.poll()
        return time.perf_counter() - started

    return timed


def step_time(model: Any, reduce: str, W: int, length: int = 256) -> dict[str, Any]:
    """Median over interleaved pairs of step time at W / step time at one rank."""
    dcp = graphattn.DCP(graphattn.VirtualGroup(W), 16, reduce)  # type: ignore[arg-type]
    with capture(model, None) as one, capture(model, dcp) as many:
        first, second = steps(one, length), steps(many, length)
        pairs = [(first(), second()) for _ in range(PAIRS)]
    return {
        "reduce": reduce,
        "W": W,
        "length": length,
        "pairs": PAIRS,
        "one_rank_ms": 1e3 * statistics.median(a for a, _ in pairs),
        "ratio": statistics.median(b / a for a, b in pairs),
    }


def capacity(model: Any, W: int) -> dict[str, Any]:
    """Longest sequence with four pages of 64 per rank."""
    dcp = graphattn.DCP(graphattn.VirtualGroup(W)) if W > 1 else None
    options: dict[str, Any] = {"max_batch": 1, "max_tokens": 16, "num_pages": 4, "dcp": dcp}
    with graphattn.capture(model, backend="eager", **options) as engine:
        return {"W": W, "kv_tokens": engine.config.bounds.max_seq_len}


def main() -> None:
    """Run every part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-record", action="store_true", help="print only")
    arguments = parser.parse_args()
    model, shared = tiny_llama(), context()
    print(f"machine: {shared['machine']}\nversions: {shared['versions']}\n", flush=True)
    records = []
    for reduce in ("ag_rs", "a2a"):
        for W in (2, 4, 8):
            found = messages(model, reduce, W)
            records.append({"part": "messages"} | found)
            print(
                f"{reduce:5} W={W}: {found['collectives_per_layer']:.0f} collectives and "
                f"{found['bytes_per_layer']:.0f} B per rank and layer, as the formula says",
                flush=True,
            )
    for reduce in ("ag_rs", "a2a"):
        for W in (2, 4):
            found = step_time(model, reduce, W)
            records.append({"part": "step_time"} | found)
            print(
                f"{reduce:5} W={W}: step {found['ratio']:.2f} x one rank's "
                f"{found['one_rank_ms']:.2f} ms ({PAIRS} pairs)",
                flush=True,
            )
    for W in (1, 2, 4, 8):
        found = capacity(model, W)
        records.append({"part": "capacity"} | found)
        print(f"W={W}: {found['kv_tokens']} tokens in four pages of 64 per rank", flush=True)
    if not arguments.no_record:
        append(RESULTS / "dcp.jsonl", shared, records)


if __name__ == "__main__":
    main()
