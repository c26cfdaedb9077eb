"""Part `traces` of `profiles/gpu.sh`: some decode steps under torch.profiler, as one trace file.

`python -m profiles.gpu_traces` runs the same steps for another profiler: `profiles/nsys.sh`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

import graphattn
from graphattn.profiling.reading import read_profile
from graphattn.profiling.report import report_of
from profiles.interleave import timed_step
from profiles.place import Place, Record
from profiles.plain_llama import LLAMA_8B, Shape, plain_llama

STEPS, ROWS = 18, 8


def traces(place: Place, folder: Path) -> list[Record]:
    """`trace.json.gz` for the Perfetto viewer and for `graphattn profile-report`, which is printed.
    The capture is in it: what a graph's nodes belong to is known from there."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (not place.dry)
    with profile(activities=activities) as profiler:
        decode(place)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "trace.json.gz"
    profiler.export_chrome_trace(str(file))
    if place.dry:
        print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))
    else:
        print(report_of(read_profile(file)))
    return [{"part": "traces", "file": file.name, "bytes": file.stat().st_size, "steps": STEPS}]


def decode(place: Place) -> None:
    """Capture some layers of an 8B model, prefill 8 rows, decode `STEPS` steps."""
    shape = Shape() if place.dry else replace(LLAMA_8B, layers=4, vocab=32_000)
    model = plain_llama(shape, max_seq_len=1024, device=place.device, dtype=place.dtype)
    with graphattn.capture(model, max_batch=ROWS, max_seq_len=512, buckets=[ROWS]) as engine:
        for i in range(ROWS):
            engine.submit([i + 1] * 16, max_new_tokens=2 * STEPS)
        for _ in range(STEPS):
            timed_step(engine)
        place.synchronize()


def main() -> None:
    """Decode where nobody but an outer profiler looks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="on a CPU, at a small size")
    dry: bool = parser.parse_args().dry
    decode(Place(torch.device("cpu" if dry else "cuda"), dry))


if __name__ == "__main__":
    main()
