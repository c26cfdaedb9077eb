"""Part `traces` of `profiles/gpu.sh`: some decode steps under torch.profiler, as one trace file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

import graphattn
from profiles.interleave import timed_step
from profiles.place import Place, Record
from profiles.plain_llama import LLAMA_8B, Shape, plain_llama

STEPS = 10


def traces(place: Place, folder: Path) -> list[Record]:
    """`trace.json.gz` for the Perfetto viewer or `graphattn profile-report`: captured, then run."""
    shape = Shape() if place.dry else replace(LLAMA_8B, layers=4, vocab=32_000)
    model = plain_llama(shape, max_seq_len=1024, device=place.device, dtype=place.dtype)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (not place.dry)
    with graphattn.capture(model, max_batch=8, max_seq_len=512, buckets=[8]) as engine:
        for i in range(8):
            engine.submit([i + 1] * 16, max_new_tokens=STEPS + 20)
        for _ in range(8):
            timed_step(engine)
        with profile(activities=activities) as profiler:
            for _ in range(STEPS):
                timed_step(engine)
            place.synchronize()
    file = folder / "trace.json.gz"
    profiler.export_chrome_trace(str(file))
    by = "self_cpu_time_total" if place.dry else "self_device_time_total"
    print(profiler.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=60))
    return [{"part": "traces", "file": file.name, "bytes": file.stat().st_size, "steps": STEPS}]
