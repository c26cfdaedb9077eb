"""Parts of `profiles/gpu.sh`: `python -m profiles.gpu PART --out FILE [--dry]`.

Each part prints what it finds and appends records to --out. `--dry` runs the same code on a CPU
with sizes that a CPU can do, so that a mistake does not wait for a GPU to be found.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import graphattn
from graphattn.engine import Engine
from profiles.attention import DecodeAttention, decode_attention, gqa, latent
from profiles.gpu_checks import memory, options, paths
from profiles.gpu_traces import traces
from profiles.interleave import timed_step
from profiles.peaks import Peaks, measure_peaks, seconds
from profiles.peers import PEERS, Candidate, candidates
from profiles.place import Place, Record
from profiles.plain_llama import LLAMA_8B, Shape, plain_llama
from profiles.record import append, context, spread
from profiles.roofline import attention_work

# What `attention` measures: real size, and size of a dry run.
ATTENTION = {
    "gqa-8b": (gqa(32, 8, 128), gqa(4, 2, 64)),
    "latent-of-16": (latent(16), latent(5, 48, 40)),
    "latent-of-128": (latent(128), latent(5, 48, 40)),
}
# Rows and their length, the most telling first.
CASES = ((32, 4096), (1, 4096), (128, 4096), (32, 16384))
LAUNCH_NODES = (1000, 100, 10, 1)


def launch(place: Place) -> list[Record]:
    """What a straight-line graph of tiny kernels costs: host time to launch, device time to run."""
    return [_launch(place, nodes) for nodes in LAUNCH_NODES]


def _launch(place: Place, nodes: int) -> Record:
    counter = torch.zeros(1, device=place.device)

    def line() -> None:
        for _ in range(nodes):
            counter.add_(1)

    replay = place.replayed(line)
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


def attention(place: Place) -> list[Record]:
    """Decode attention of one layer, ours and that of every peer, each checked before it is timed:
    bytes of KV a second beside those of a copy in the same run."""
    peaks = measure_peaks(place.device, place.dtype, shrink=32 if place.dry else 1)
    print(
        f"copy {peaks.copy_bytes_per_s / 1e9:.0f} GB/s, matmul {peaks.matmul_ops_per_s / 1e12:.1f}"
    )
    cases = [(4, 64)] if place.dry else CASES
    return [
        record
        for batch, length in cases
        for kind in ATTENTION
        for record in _attention(place, kind, batch, length, peaks)
    ]


def _attention(place: Place, kind: str, batch: int, length: int, peaks: Peaks) -> list[Record]:
    layer = ATTENTION[kind][place.dry]
    problem = decode_attention(layer, [length] * batch, dtype=place.dtype, device=place.device)
    case = {"part": "attention", "kind": kind, "batch": batch, "length": length}
    # Compiling FlexAttention for a CPU takes longer than all else of a dry run.
    names = tuple(peer.name for peer in PEERS if not (place.dry and peer.name == "flex"))
    return [
        case | {"peer": candidate.name} | _timed(place, problem, candidate, peaks)
        for candidate in candidates(problem, names)
    ]


def _timed(place: Place, problem: DecodeAttention, candidate: Candidate, peaks: Peaks) -> Record:
    layer, size = problem.layer, place.dtype.itemsize
    found: Record = {"reason": candidate.reason}
    if candidate.call is not None:
        try:
            taken = seconds(place.replayed(candidate.call), 30, place.device)
            rate = attention_work(layer, problem.lengths, size, size).bytes
            rate /= statistics.median(taken)
            of_copy = rate / peaks.copy_bytes_per_s
            found = {"taken_s": spread(taken), "bytes_per_s": rate, "of_copy": of_copy}
        except Exception as error:  # of a peer in a graph; the others are still timed
            found = {"reason": f"cannot be captured: {error!r}"[:300]}
    said = found.get("reason") or f"{found['bytes_per_s'] / 1e9:.0f} GB/s, {of_copy:.0%} of copy"
    print(
        f"{len(problem.lengths)} rows of {problem.lengths[0]}, {layer.num_q_heads} heads of ",
        end="",
    )
    print(f"{layer.head_dim}, {candidate.name}: {said}", flush=True)
    ours_failed = candidate.name == "graphattn" and found.get("reason") is not None
    return found | {"ok": not ours_failed}


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
    return {"part": "step", "batch": batch, "backend": backend, "taken_s": spread(taken)}


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


PARTS = {
    "launch": launch,
    "paths": paths,
    "options": options,
    "memory": memory,
    "attention": attention,
    "step": step,
}


def main() -> int:
    """Run one part; exit code 1 when something in it was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=[*PARTS, "traces"])
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended here")
    parser.add_argument("--dry", action="store_true", help="small sizes, on the CPU")
    arguments = parser.parse_args()
    place = Place(torch.device("cpu" if arguments.dry else "cuda"), arguments.dry)
    if arguments.part == "traces":
        records = traces(place, arguments.out.parent)
    else:
        records = PARTS[arguments.part](place)
    append(arguments.out, context(), records)
    return 0 if all(record.get("ok", True) for record in records) else 1


if __name__ == "__main__":
    raise SystemExit(main())
