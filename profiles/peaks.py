"""What a machine can do at most, measured in the same run as everything that is held against it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

# Bytes of a copied buffer, well above every cache; rows of a square product.
_COPY = {"cpu": 1 << 28, "cuda": 1 << 30}
_ROWS = {"cpu": 2048, "cuda": 8192}


@dataclass(frozen=True, slots=True)
class Peaks:
    """The best of a few large copies and of a few large matrix products."""

    copy_bytes_per_s: float  # bytes read and bytes written, both counted
    matmul_ops_per_s: float  # a multiplication and an addition are two
    dtype: str  # of the product


def measure_peaks(device: torch.device, dtype: torch.dtype, *, shrink: int = 1) -> Peaks:
    """Takes two seconds. `shrink` divides the sizes, for runs that only try the code."""
    size, rows = _COPY[device.type] // shrink, _ROWS[device.type] // shrink
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(rows, rows, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    copied = min(seconds(lambda: target.copy_(source), 15, device))
    multiplied = min(seconds(lambda: torch.mm(a, b, out=out), 15, device))
    return Peaks(2 * size / copied, 2 * rows**3 / multiplied, str(dtype).removeprefix("torch."))


def seconds(work: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    """Device time of `work`, once per repeat, after three unmeasured ones."""
    for _ in range(3):
        work()
    once = _cuda_seconds if device.type == "cuda" else _host_seconds
    return [once(work) for _ in range(repeats)]


def _host_seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _cuda_seconds(work: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3
