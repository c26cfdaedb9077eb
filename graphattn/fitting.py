"""From what the caller asked for to bounds that fit in the memory of the device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from graphattn.dcp import DCP
from graphattn.errors import wrong
from graphattn.footprint import Footprint, predict
from graphattn.models.contract import StepModel
from graphattn.sizing import (
    GPU_MEMORY_SHARE,
    EngineConfig,
    Options,
    open_memory,
    resolve,
)
from graphattn.step import step_program
from graphattn.stream import Stream

ACTIVATION_MARGIN = 1.25  # graph pool over the measured peak of the largest step: fragmentation
SCARCE = 0.5  # share of the free memory above which the estimate of the graphs is worth its time
MEMINFO = Path("/proc/meminfo")


def resolve_measured(options: Options, model: StepModel, stream: Stream) -> EngineConfig:
    """Like `resolve`, for bounds that fit; on a GPU, by default, the pages take what the largest
    step leaves.

    The step is run once, idle, over a small pool, and its peak is measured: predicting the memory
    of graphs has cost others a third of their cache, or an out-of-memory error.

    Raises `ConfigError` with the breakdown, before anything is allocated, for what cannot fit.
    """
    config = resolve(options, model)
    explicit = options.num_pages is not None or options.memory_budget is not None
    check_fits(model, config, pages_asked_for=explicit)
    if explicit or config.device.type != "cuda":
        return config
    peak = _peak_bytes(model, config, stream)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(config.device)
    budget = _smallest(int(free * GPU_MEMORY_SHARE - peak * ACTIVATION_MARGIN), config.dcp)
    return resolve(replace(options, memory_budget=budget, speculate=config.speculate), model)


def check_fits(model: StepModel, config: EngineConfig, *, pages_asked_for: bool) -> None:
    """Raise `ConfigError` unless what is predicted fits in the memory that is free now.

    Pages that nobody asked for do not count: on a GPU they take what is left, on a CPU they are
    committed as they are written.
    """
    if (free := free_bytes(config.device)) is None:
        return
    predicted = predict(model, config)
    if _needed(predicted, config, pages_asked_for) > free * SCARCE:
        predicted = predict(model, config, graphs=True)
    if (needed := _needed(predicted, config, pages_asked_for)) <= free:
        return
    parts = predicted.sizes() if pages_asked_for else predicted.sizes() | {"pages": None}
    largest_first = sorted(((n or 0, name) for name, n in parts.items()), reverse=True)
    breakdown = ", ".join(f"{name} {size:,}" for size, name in largest_first if size)
    raise wrong(
        "num_pages, memory_budget" if pages_asked_for else "max_batch, max_seq_len, max_tokens",
        f"bounds whose memory fits in the {free:,} bytes that are free on {config.device}",
        f"{needed:,} bytes: {breakdown}",
        "Lower the bound behind the largest part; nothing was allocated.",
    )


def free_bytes(device: torch.device) -> int | None:
    """Bytes that are free on a GPU or available to a process on this host; None if unknown.

    On a GPU with what torch holds and does not use.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if not MEMINFO.is_file():
        return None
    for line in MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _needed(footprint: Footprint, config: EngineConfig, pages_asked_for: bool) -> int:
    """Bytes of the device's memory."""
    elsewhere = footprint.rings if config.device.type == "cuda" else 0
    pages = 0 if pages_asked_for else footprint.pages
    return sum(size or 0 for size in footprint.sizes().values()) - elsewhere - pages


def _smallest(budget: int, dcp: DCP | None) -> int:
    """Of the ranks' budgets: page ids serve every rank, so the pools must be equal."""
    if dcp is None or not isinstance(dcp.group, dist.ProcessGroup):
        return budget
    budgets = [budget] * dcp.size
    dist.all_gather_object(budgets, budget, group=dcp.group)
    return min(budgets)


def _peak_bytes(model: StepModel, config: EngineConfig, stream: Stream) -> int:
    """Bytes that the largest step needs beside the weights, its own buffers included."""
    before = torch.cuda.memory_allocated(config.device)
    torch.cuda.reset_peak_memory_stats(config.device)
    small = replace(config, bounds=replace(config.bounds, num_pages=config.bounds.pages_per_seq))
    group = None if config.dcp is None else config.dcp.open()
    memory, drafter = open_memory(model, small, group)
    program = step_program(model, memory, next(iter(config.buckets)), drafter)
    stream.join()
    stream.submit(program)
    stream.mark().wait()
    if group is not None:
        group.close()
    pools = [*memory.target.pools().values(), *(drafter.pools().values() if drafter else ())]
    peak: int = torch.cuda.max_memory_allocated(config.device) - before
    kv_bytes: int = sum(pool.numel() * pool.itemsize for pool in pools)
    return peak - kv_bytes
