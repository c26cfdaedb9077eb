"""Capture a family of programs that share memory: one graph per bucket of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from .arena import Arena
from .eager import EagerGraph
from .errors import CaptureError
from .graph import Graph, gc_paused
from .host import HostGraph
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
    graphs: dict[str, Graph] = {}
    make = _backend(backend, device=device, stream=stream, untouched=tuple(untouched))
    try:
        with gc_paused(), random_state_preserved(device):
            _warm(programs, backend=backend, untouched=untouched)
            for name, program in programs.items():
                graphs[name] = make(name)
                with _named(name):
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
) -> Callable[[str], Graph]:
    if backend == "host":
        arena = Arena()
        return lambda name: HostGraph(name, arena=arena, untouched=untouched)
    if backend == "eager":
        return lambda name: EagerGraph(name, device=device, untouched=untouched)
    raise ValueError(f"backend: wanted 'cuda', 'host' or 'eager', got {backend!r}.")


def _warm(programs: Mapping[str, Program], *, backend: str, untouched: Sequence[Tensor]) -> None:
    """Run what the programs do only once (imports, lazily made tables) before any capture.

    Recording and eager capture run each program anyway, so the last, smallest one is enough.
    """
    name, program = next(reversed(programs.items()))
    preserved = Preserved(untouched)
    try:
        with _named(name), grad_mode(torch.is_inference_mode_enabled()), PreserveMode(preserved):
            program()
    finally:
        preserved.restore()


class _named:
    """Turns any exception into a `CaptureError` that names the program."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception):
            raise CaptureError(f"program {self._name!r}: {error}") from error
