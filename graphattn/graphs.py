"""The graphs of an engine: one per bucket, captured on idle inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from graphattn._capture.family import capture_family
from graphattn._capture.graph import Graph
from graphattn.config import Bucket
from graphattn.sizing import EngineConfig
from graphattn.stream import CudaStream, Stream


def capture_graphs(
    programs: Mapping[Bucket, Callable[[], None]],
    config: EngineConfig,
    stream: Stream,
    weights: Mapping[str, Tensor],
    untouched: Iterable[Tensor],
    progress: Callable[[str, int, int], None] | None,
) -> dict[Bucket, Graph]:
    """A graph of each program; `weights` are constants. All rows are padding, so no slot, page or
    token changes: the pools are `untouched`."""
    stream.join()
    by_name = {bucket.name: bucket for bucket in programs}
    graphs = capture_family(
        {bucket.name: program for bucket, program in programs.items()},
        backend=config.backend,
        device=config.device,
        stream=stream.cuda if isinstance(stream, CudaStream) else None,
        weights=weights,
        prepack=config.prepack,
        untouched=tuple(untouched),
        progress=progress,
    )
    return {by_name[name]: graph for name, graph in graphs.items()}
