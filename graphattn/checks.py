"""Checks of any program: what a CUDA graph cannot hold, and whether replay equals eager."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from graphattn._capture import verify as core
from graphattn.errors import wrong
from graphattn.graph import Graph

if TYPE_CHECKING:
    from graphattn._capture.audit import AuditReport


def audit(
    fn: Callable[..., Any],
    *args: Any,
    device: str = "cuda",
    advance: Callable[[], object] | None = None,
) -> AuditReport:
    """Run `fn(*args)` twice on a fake CUDA device and report all that a CUDA graph cannot hold.

    Needs no GPU and no driver, only a CUDA build of torch (`CaptureError` without one). Tensors
    that the program meets, on whatever device, stand for device tensors of the same layout; nothing
    of theirs is read or written. Each finding names file, line, source, the reason and the fix:
    host reads, shapes that depend on values, copies between host and device, tensors made from
    Python data, waits, other streams, random states. What differs between the two runs would be
    frozen, and is named where it enters: numbers, paths, tensors made anew; `advance()` is called
    between them, to move on what a loop moves on between steps on the host.

    A line, or the one above it, allows a finding with `# graphattn: allow CATEGORY: REASON`.
    `report.ok` says that there are no others, `str(report)` is for people, `report.to_json()` for
    programs. Raises `CaptureError` for a device that is not CUDA.
    """
    from graphattn._capture.audit import audit as run  # what it needs of torch takes long to import

    return run(fn, *args, device=device, advance=advance)


def verify(
    graph: Graph,
    *,
    inputs: Callable[[int], None],
    watch: Mapping[str, Tensor],
    steps: int = 4,
    poison: Callable[[], None] | None = None,
) -> core.VerifyReport:
    """Replay `graph` and run its program eagerly on the same memory, and compare bit for bit.

    Each of `steps` steps calls `inputs(step)`, which writes new contents into the program's inputs,
    then runs the program eagerly and the graph, each from the same contents and random states; in
    the first two steps, and where the two differ, eagerly once more: what differs there is not
    deterministic, and named. `watch` has, by name, all state that
    the program reads and writes, such as KV pools, and what else is to be compared; the graph's
    outputs are compared without being named. `poison` spoils, before the replay, what the program
    must write anew (`StepBuffers.spoil`). Memory for copies of what is watched is needed three
    times. The state goes on from the replay. `report.ok`, `str(report)`.
    """
    if not isinstance(graph, Graph):
        raise wrong(
            "graph", "a graphattn.Graph", type(graph).__name__, "Pass Graph(fn, device=...)."
        )
    outputs = {f"outputs[{i}]": tensor for i, tensor in enumerate(_tensors(graph.outputs))}

    def eager() -> None:
        for fixed, output in zip(outputs.values(), _tensors(graph.run_eagerly()), strict=True):
            if output is not fixed:
                fixed.copy_(output)

    with torch.no_grad():
        return core.verify(
            eager,
            graph.replay,
            inputs=inputs,
            watch=ChainMap(outputs, watch),  # type: ignore[arg-type]  # only read
            steps=steps,
            poison=poison,
        )


def _tensors(outputs: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_iter(outputs) if isinstance(leaf, Tensor))
