"""Graph: any program on fixed memory, captured once and replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from graphattn._capture import graph as captured
from graphattn._capture.errors import GraphStateError
from graphattn._capture.family import capture_family
from graphattn.config import resolve_backend
from graphattn.errors import wrong
from graphattn.stream import CudaStream, Stream, open_stream

Program = Callable[[], Any]


class Graph:
    """A program, captured: what `fn` does on `device`, replayed without its Python code.

        captured by the constructor --replay()--> --replay()--> ... --close()--> closed

    `backend`: "cuda" (a CUDA graph), "host" (CPU: every torch operation is recorded once and called
    again under the rules of a CUDA graph), "eager" (`fn` itself, nothing frozen), or "auto", which
    is "cuda" on a CUDA device and "host" on a CPU.

    **What may change between replays is contents, and nothing else.** The graph reads and writes
    the tensors that `fn` used, at their addresses: `fn` gets its inputs from tensors that were made
    before and are written in place (`copy_`), and leaves results in such tensors or returns them.
    Frozen are shapes, strides, dtypes, and all that `fn` read from Python: numbers, flags, lists,
    which branch was taken. Refused, naming the line and what to write instead, are reading a tensor
    on the host, shapes that depend on values, tensors made from Python data, and memory that `fn`
    exchanges or resizes.

    **Ownership.** The graph keeps `fn` alive, and through it every tensor that `fn` refers to; a
    tensor that `fn` reaches in no other way than by its address must be kept by the caller.
    `outputs` is what `fn` returned: the same tensors after every replay, with new contents;
    undefined before the first. Outputs alias inputs where `fn` returns views of them.

    **Capture leaves no trace.** `fn` runs a few times to warm up and once to be captured; whatever
    it writes into memory that existed before is put back, bit for bit, and so are torch's random
    states. Putting back takes a copy of each such tensor: name the large ones that these runs leave
    as they are, such as KV pools while no row has a place, in `untouched`; the caller vouches for
    them. Random numbers drawn through torch's default generators are new in every replay, as they
    would be eagerly.

    **Weights** are contents too: what is written in place the next replay sees; a parameter that
    was exchanged for another, or whose `data` was, is not what the graph reads. With `prepack`, the
    host backend keeps packed copies, for the CPU, of those of `weights` that linears use (float32
    matrices, by name), and differs from eager in rounding; it packs anew what torch counts as
    written, and everything after `weights_changed()`. Other backends ignore it.

    **Order.** On CUDA a replay is enqueued behind the work of the caller's current stream, and
    later work there waits for it: as if `fn` ran in that stream. On a CPU it has run on return.
    Not thread-safe. Raises `CaptureError` naming the program; then nothing was kept or changed.
    """

    def __init__(
        self,
        fn: Program,
        *,
        device: torch.device | str,
        backend: str = "auto",
        untouched: Iterable[Tensor] = (),
        weights: Mapping[str, Tensor] | None = None,
        prepack: bool = False,
        name: str | None = None,
    ) -> None:
        name = name or str(getattr(fn, "__name__", "program"))
        self._fn: Program | None
        ((self._fn, self._stream, self._graph),) = _capture(
            {name: fn}, device, backend, untouched, weights, prepack
        )

    @classmethod
    def family(
        cls,
        programs: Mapping[str, Program],
        *,
        device: torch.device | str,
        backend: str = "auto",
        untouched: Iterable[Tensor] = (),
        weights: Mapping[str, Tensor] | None = None,
        prepack: bool = False,
    ) -> dict[str, Graph]:
        """A graph of each program, by name, in memory that they share: one per bucket of a step.

        Give the largest first: all are warmed before the first is captured, and the largest makes
        the memory that the others fit in. A replay overwrites the intermediates of the others,
        never their outputs; they are replayed one at a time. Each is closed for itself. When one
        cannot be captured, none is kept. Options as of `Graph`; packed weights exist once.
        """
        family = {}
        for fn, stream, graph in _capture(programs, device, backend, untouched, weights, prepack):
            family[graph.name] = own = cls.__new__(cls)
            own._fn, own._stream, own._graph = fn, stream, graph
        return family

    @property
    def name(self) -> str:
        """As given, or the name of the function."""
        return self._graph.name

    @property
    def outputs(self) -> Any:
        """What the program returned; its tensors are rewritten by every replay. None if closed."""
        return self._graph.outputs

    @property
    def info(self) -> captured.GraphInfo:
        """Number and kinds of nodes, seconds of capture, bytes of memory. Refused once closed."""
        return self._graph.info

    def replay(self) -> None:
        """Run the captured work once. Raises `GraphStateError` when closed."""
        self._stream.join()
        self._graph.replay()
        self._stream.precede()

    def weights_changed(self) -> None:
        """Weights were written in ways that torch does not count, such as by a kernel of one's own:
        packed copies are made anew at the next replay. Raises `GraphStateError` when closed."""
        self._graph.weights_changed()

    def run_eagerly(self) -> Any:
        """Run `fn` itself where the graph runs and return its outputs: what replays must equal."""
        if (fn := self._fn) is None:
            raise GraphStateError(f"graph {self.name!r}: it is closed and has no program any more.")
        results: list[Any] = []
        self._stream.join()
        with torch.no_grad():
            self._stream.submit(lambda: results.append(self._graph.run_eagerly(fn)))
        self._stream.precede()
        return results[0]

    def close(self) -> None:
        """Release the graph, its memory and `fn`; waits for replays that still run. Again: nothing.

        What `fn` returned lives on while somebody holds it.
        """
        self._graph.close()
        self._fn = None

    def __enter__(self) -> Graph:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _capture(
    programs: Mapping[str, Program],
    device: torch.device | str,
    backend: str,
    untouched: Iterable[Tensor],
    weights: Mapping[str, Tensor] | None,
    prepack: bool,
) -> list[tuple[Program, Stream, captured.Graph]]:
    """Each program with the stream and the graph that serve it."""
    if not programs or not all(map(callable, programs.values())):
        raise wrong("programs", "callables without arguments, by name", programs, "Pass functions.")
    if prepack and not weights:
        raise wrong(
            "weights", "the weights to pack", weights, "Pass dict(model.named_parameters())."
        )
    device = torch.device(device)
    kind = resolve_backend(backend, device)
    stream = open_stream(device)
    stream.join()
    graphs = capture_family(
        programs,
        backend=kind,
        device=device,
        stream=stream.cuda if isinstance(stream, CudaStream) else None,
        untouched=tuple(untouched),
        weights=weights,
        prepack=prepack and kind == "host",
    )
    stream.precede()
    return [(programs[name], stream, graph) for name, graph in graphs.items()]
