"""Parts of `profiles/gpu.sh`: `python -m profiles.gpu paths|launch|attention|step`.

Each part prints what it finds and appends records to --out. `--dry` runs the same code on a CPU
with sizes that a CPU can do, so that a mistake does not wait for a GPU to be found.
"""

from __future__ import annotations

import argparse
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import graphattn
from graphattn.engine import Engine
from profiles.attention import decode_attention, gqa, latent
from profiles.interleave import timed_step
from profiles.peaks import measure_peaks, seconds
from profiles.plain_llama import DEEPSEEK_V3, LLAMA_8B, Shape, plain_llama
from profiles.record import append, context, spread

PATHS = {
    "gqa-64": Shape(),
    "mha-80": Shape(heads=3, kv_heads=3, head_dim=80),
    "gqa-96": Shape(head_dim=96),
    "gqa-128-of-9": Shape(heads=9, kv_heads=3, head_dim=128),
    "mqa-256-of-16": Shape(heads=16, kv_heads=1, head_dim=256),
    "windows": Shape(layers=3, windows=(0, 24, 8)),
    "softcap": Shape(softcap=30.0),
    "sinks": Shape(sinks=True, windows=(16, 0)),
    "latent-48-of-5": Shape(heads=5, kv_heads=1, head_dim=48, value_dim=40, windows=(0, 24)),
    "latent-576-of-16": replace(DEEPSEEK_V3, layers=2, hidden=64, heads=16, vocab=251),
    "latent-576-of-128": replace(DEEPSEEK_V3, layers=2, hidden=64, vocab=251),
}
# What `attention` measures: real size, and size of a dry run.
ATTENTION = {
    "gqa-8b": (gqa(32, 8, 128), gqa(4, 2, 64)),
    "latent-of-16": (latent(16), latent(5, 48, 40)),
    "latent-of-128": (latent(128), latent(5, 48, 40)),
}
LAUNCH_NODES = (1, 10, 100, 1000)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a part runs, and whether at its real size."""

    device: torch.device
    dry: bool

    @property
    def dtype(self) -> torch.dtype:
        """bf16 is what a GPU serves; a CPU has it only slowly."""
        return torch.float32 if self.dry else torch.bfloat16

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


Record = dict[str, Any]


def paths(place: Place) -> list[Record]:
    """Capture every path of the attention; replay must emit the tokens of the eager step."""
    return [_path(place, name, shape) for name, shape in PATHS.items()]


def _path(place: Place, name: str, shape: Shape) -> Record:
    try:
        model = plain_llama(shape, max_seq_len=160, device=place.device, dtype=place.dtype)
        replayed, report = _tokens(model, "auto")
        eager, _ = _tokens(model, "eager")
    except Exception as error:
        traceback.print_exc()
        return {"part": "paths", "path": name, "ok": False, "error": repr(error)[:500]}
    equal = replayed == eager
    print(f"{name}: {'tokens equal eager' if equal else 'TOKENS DIFFER'}\n{report}\n", flush=True)
    buckets = {b.name: [b.nodes, b.capture_seconds, b.memory_bytes] for b in report.buckets}
    return {"part": "paths", "path": name, "ok": equal, "buckets": buckets}


def _tokens(model: Any, backend: str) -> tuple[list[Any], graphattn.EngineReport]:
    """Tokens of prompts below, at and above a page and a prefill chunk."""
    prompts = [[(7 * i + j) % 251 for j in range(n)] for i, n in enumerate((1, 15, 16, 17, 40, 64))]
    with graphattn.capture(
        model, max_batch=4, max_tokens=48, page_size=16, backend=backend
    ) as engine:
        completions = engine.generate(prompts, max_new_tokens=24)
        return [completion.token_ids for completion in completions], engine.report()


def launch(place: Place) -> list[Record]:
    """What a straight-line graph of tiny kernels costs: host time to launch, device time to run."""
    return [_launch(place, nodes) for nodes in LAUNCH_NODES]


def _launch(place: Place, nodes: int) -> Record:
    counter = torch.zeros(1, device=place.device)

    def line() -> None:
        for _ in range(nodes):
            counter.add_(1)

    replay = line if place.dry else _straight_line(line)
    device_s = seconds(replay, 50, place.device)
    host_s = []
    for _ in range(50):
        place.synchronize()
        started = time.perf_counter()
        replay()
        host_s.append(time.perf_counter() - started)
    host, device = statistics.median(host_s), statistics.median(device_s)
    print(
        f"{nodes} nodes: {host * 1e6:.1f} us of the host to launch, {device * 1e6:.1f} us on the "
        f"device, {device / nodes * 1e6:.2f} us a node",
        flush=True,
    )
    return {
        "part": "launch",
        "nodes": nodes,
        "host_s": spread(host_s),
        "device_s": spread(device_s),
    }


def _straight_line(work: Callable[[], None]) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        work()
        with torch.cuda.graph(graph, stream=stream):
            work()
    torch.cuda.synchronize()
    replay: Callable[[], None] = graph.replay
    return replay


def attention(place: Place) -> list[Record]:
    """Decode attention of one layer: bytes of KV read a second, beside a device copy."""
    peaks = measure_peaks(place.device, place.dtype, shrink=64 if place.dry else 1)
    copied = peaks.copy_bytes_per_s
    print(f"copy: {copied / 1e9:.0f} GB/s", flush=True)
    cases = [(4, 64)] if place.dry else [(1, 4096), (8, 4096), (32, 4096), (32, 16384), (128, 4096)]
    return [
        _attention(place, kind, batch, length, copied)
        for kind in ATTENTION
        for batch, length in cases
    ]


def _attention(place: Place, kind: str, batch: int, length: int, copied: float) -> Record:
    real, small = ATTENTION[kind]
    layer = small if place.dry else real
    problem = decode_attention(layer, [length] * batch, dtype=place.dtype, device=place.device)
    step, entry = problem.run, layer.entry_values * place.dtype.itemsize
    read = batch * length * entry
    taken = seconds(step if place.dry else _straight_line(step), 30, place.device)
    rate = read / statistics.median(taken)
    print(
        f"{kind} B={batch} L={length}: {rate / 1e9:.0f} GB/s, {rate / copied:.0%} of copy",
        flush=True,
    )
    return {
        "part": "attention",
        "kind": kind,
        "batch": batch,
        "length": length,
        "seconds": spread(taken),
        "bytes_per_s": rate,
        "of_copy": rate / copied,
    }


def step(place: Place) -> list[Record]:
    """A decode step of layers of an 8B model: the graph beside the eager step."""
    shape = Shape() if place.dry else replace(LLAMA_8B, layers=8, vocab=32_000)
    model = plain_llama(shape, max_seq_len=4096, device=place.device, dtype=place.dtype)
    return [
        _step(place, model, batch, backend) for batch in (1, 8) for backend in ("auto", "eager")
    ]


def _step(place: Place, model: Any, batch: int, backend: str) -> Record:
    with graphattn.capture(
        model, max_batch=batch, max_seq_len=512, buckets=[batch], backend=backend
    ) as engine:
        taken = _decode_seconds(engine, batch)
    print(f"batch {batch}, {backend}: {statistics.median(taken) * 1e3:.3f} ms a step", flush=True)
    return {"part": "step", "batch": batch, "backend": backend, "seconds": spread(taken)}


def _decode_seconds(engine: Engine, batch: int) -> list[float]:
    """Wall time of decode steps, each launched and read before the next."""
    for i in range(batch):
        engine.submit([i + 1] * 16, max_new_tokens=64)
    for _ in range(8):
        timed_step(engine)
    taken = []
    while engine.busy:
        read = engine.stats().tokens_emitted
        started = time.perf_counter()
        while engine.busy and engine.stats().tokens_emitted == read:
            engine.step()
            engine.poll()
        taken.append(time.perf_counter() - started)
    return taken


PARTS = {"paths": paths, "launch": launch, "attention": attention, "step": step}


def main() -> int:
    """Run one part; exit code 1 when a path failed or tokens differed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended here")
    parser.add_argument("--dry", action="store_true", help="small sizes, on the CPU")
    arguments = parser.parse_args()
    place = Place(torch.device("cpu" if arguments.dry else "cuda"), arguments.dry)
    records = PARTS[arguments.part](place)
    append(arguments.out, context(), records)
    return 0 if all(record.get("ok", True) for record in records) else 1


if __name__ == "__main__":
    raise SystemExit(main())
