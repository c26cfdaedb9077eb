"""Capture a family of programs that share memory: one graph per bucket of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from .arena import Arena
from .compiled import REASON, graphs_of_its_own, plain, variants
from .cuda import CudaGraph
from .eager import EagerGraph
from .errors import CaptureError
from .graph import Graph, gc_paused
from .host import HostGraph
from .nvtx_ranges import scope
from .prepack import PackedWeights
from .record import grad_mode
from .storages import Preserved, PreserveMode, random_state_preserved

Program = Callable[[], Any]
Progress = Callable[[str, int, int], None]


def capture_family(
    programs: Mapping[str, Program],
    *,
    backend: Literal["cuda", "host", "eager"],
    device: torch.device,
    stream: torch.cuda.Stream | None = None,
    weights: Mapping[str, Tensor] | None = None,
    prepack: bool = False,
    untouched: Sequence[Tensor] = (),
    progress: Progress | None = None,
) -> dict[str, Graph]:
    """Warm every program, then capture each in the given order (largest first).

    The graphs share one pool (CUDA) or one arena (host), so they must be replayed one at a time,
    on `stream` where there is one. `weights` by name are constants whose linears `prepack` may
    pack for the CPU. `untouched` are tensors that the caller vouches are not modified while the
    programs run here; everything else that they write is put back afterwards, bit for bit, and
    so are the random states. `progress(name, done, total)` is called after each capture.

    Raises `CaptureError` naming the program that failed. Then every graph is closed, and memory,
    random states and garbage collection are as before.
    """
    for name, program in programs.items():
        if part := graphs_of_its_own(program):
            raise CaptureError(f"program {name!r}: {part} {REASON}")
    graphs: dict[str, Graph] = {}
    packed = PackedWeights((weights or {}).values() if prepack else ())
    make = _backend(
        backend, device=device, stream=stream, untouched=tuple(untouched), packed=packed
    )
    try:
        with gc_paused(collect=backend == "cuda"), random_state_preserved(device):
            _warm(programs, backend=backend, stream=stream, untouched=untouched)
            for name, program in programs.items():
                graphs[name] = make(name)
                with named(name), scope(f"capture.{name}"):
                    graphs[name].capture(program)
                if progress is not None:
                    progress(name, len(graphs), len(programs))
    except BaseException:
        for graph in graphs.values():
            graph.close()
        raise
    return graphs


def _backend(
    backend: str,
    *,
    device: torch.device,
    stream: torch.cuda.Stream | None,
    untouched: tuple[Tensor, ...],
    packed: PackedWeights,
) -> Callable[[str], Graph]:
    if backend == "host":
        arena = Arena()
        return lambda name: HostGraph(name, arena=arena, untouched=untouched, packed=packed)
    if backend == "eager":
        return lambda name: EagerGraph(name, device=device, untouched=untouched)
    if backend == "cuda":
        if stream is None:
            raise ValueError("stream: wanted a torch.cuda.Stream for backend='cuda', got None.")
        pool = torch.cuda.graph_pool_handle()
        return lambda name: CudaGraph(name, device=device, stream=stream, pool=pool)
    raise ValueError(f"backend: wanted 'cuda', 'host' or 'eager', got {backend!r}.")


WARM_RUNS = 2  # lazily made handles and workspaces at the first, their steady state at the second


def _warm(
    programs: Mapping[str, Program],
    *,
    backend: str,
    stream: torch.cuda.Stream | None,
    untouched: Sequence[Tensor],
) -> None:
    """Run what the programs do only once before any capture: imports, compilation, workspaces.

    On CUDA every program is run, since each may compile kernels of its own and the workspaces
    must have grown to their largest. Elsewhere a capture runs its program anyway, so the last,
    smallest one is enough.
    """
    if backend == "cuda":
        torch.cuda.synchronize()  # what the programs read may have been made on other streams
        with torch.cuda.stream(stream), variants(len(programs)):
            for name, program in programs.items():
                with named(name):
                    _warm_one(program, untouched, runs=WARM_RUNS)
        torch.cuda.synchronize()
    else:
        for name, program in list(programs.items())[-1:]:
            with named(name):
                _warm_one(program, untouched, runs=0)


def _warm_one(program: Program, untouched: Sequence[Tensor], *, runs: int) -> None:
    """One run that notes what is written, then `runs` as they are; memory is put back after each.

    Compiled functions run plainly in the first, since they cannot be looked into.
    """
    preserved = Preserved(untouched)
    with grad_mode(torch.is_inference_mode_enabled()):
        try:
            with plain(), PreserveMode(preserved):
                program()
            for _ in range(runs):
                preserved.restore()
                program()
        finally:
            preserved.restore()


@contextmanager
def named(program: str) -> Iterator[None]:
    """Turn any exception into a `CaptureError` that names the program."""
    try:
        yield
    except Exception as error:
        raise CaptureError(f"program {program!r}: {error}") from error
