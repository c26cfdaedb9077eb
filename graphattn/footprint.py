"""What an engine takes in memory, by what it is for: predicted from its bounds, and measured.

Both run the code that allocates, and count whose storages come into being: on fake memory for the
prediction, so that the two cannot differ, and nothing is allocated by it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from graphattn._capture.allocations import Allocations
from graphattn._capture.compiled import plain
from graphattn._capture.graph import GraphInfo
from graphattn._capture.prepack import PackedWeights
from graphattn.dcp import DCP
from graphattn.inputs import InputRing, PromptRing
from graphattn.models import weights
from graphattn.models.contract import StepModel
from graphattn.ring import OutputRing
from graphattn.sizing import EngineConfig, open_memory
from graphattn.step import step_program

# Which module allocates says what for; all others keep state of slots, or constants.
PARTS = {
    "pages": "pages",
    "metadata": "metadata",
    "attention": "workspaces",
    "dcp": "messages",
    "inputs": "blocks",
    "ring": "blocks",
    "stream": "rings",
}
OTHER = "state"


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes by what they are for, of the model and its drafter. None: not known."""

    pages: int  # KV pools
    state: int  # of slots: lengths, history, token counts, slot tensors; and constants
    metadata: int  # of a step
    workspaces: int  # of attention
    messages: int  # of a DCP group
    blocks: int  # inputs and outputs of a step, on the device
    rings: int  # their copies on the host, pinned beside a GPU
    weight_copies: int  # packed for the CPU; predicted: when all that can be packed is
    graphs: int | None  # intermediates and executables; predicted: those of the largest step

    @staticmethod
    def of(parts: Mapping[str, int], *, weight_copies: int, graphs: int | None) -> Footprint:
        """`parts`: the bytes of all others by name; none where one is missing."""
        fixed = {part: parts.get(part, 0) for part in (*PARTS.values(), OTHER)}
        return Footprint(**fixed, weight_copies=weight_copies, graphs=graphs)

    def sizes(self) -> dict[str, int | None]:
        """By name, in order."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def allocations() -> Allocations:
    """Counts what is allocated under it by the parts of a `Footprint`."""
    return Allocations(_part)


def measure(allocated: Mapping[str, int], graphs: Iterable[GraphInfo], backend: str) -> Footprint:
    """Of an engine: what it has allocated by part, and what its graphs say of themselves."""
    infos = list(graphs)
    packed = sum(info.packed_bytes for info in infos)
    own = sum(info.memory_bytes for info in infos) - packed
    return Footprint.of(allocated, weight_copies=packed, graphs=None if backend == "eager" else own)


def predict(model: StepModel, config: EngineConfig, *, graphs: bool = False) -> Footprint:
    """From the bounds alone; nothing is allocated, nothing runs on the device.

    All is exact but `weight_copies`, which is an upper bound, and `graphs`: an estimate, if asked
    for, by running the largest step of a fake copy of the model on fake memory. It sees what torch
    operations return, not what they use inside, nor what a driver adds; None when the step does
    not run there.
    """
    group = None if config.dcp is None else _Members(config.dcp)
    with torch.inference_mode(False), FakeTensorMode(allow_non_fake_inputs=True) as fake:
        with allocations() as allocated:
            _memory, drafter = open_memory(model, config, group)  # lives until it is counted
        parts = allocated.kept() | {"rings": _ring_bytes(config)}
        estimate = _largest_step(model, config, group, fake) if graphs else None
    models = {"": model} | (drafter.models() if drafter else {})
    held = [w for each in models.values() for w in weights(each).values()]
    return Footprint.of(
        parts,
        weight_copies=PackedWeights(held).most_bytes if config.prepack else 0,
        graphs=estimate,
    )


def _part() -> str:
    """What is being allocated for: who of the runtime calls, innermost first."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.startswith("graphattn.") and not name.startswith(("graphattn._capture", __name__)):
            return PARTS.get(name.split(".")[1], OTHER)
        frame = frame.f_back
    return OTHER


def _ring_bytes(config: EngineConfig) -> int:
    bounds, steps = config.bounds, config.run_ahead
    sizes = [
        *InputRing.sizes(bounds, steps_in_flight=steps),
        *OutputRing.sizes(bounds, steps_in_flight=steps),
        *PromptRing.sizes(bounds, prompts_in_flight=bounds.max_batch),
    ]
    return 4 * sum(sizes)


def _largest_step(
    model: StepModel, config: EngineConfig, group: _Members | None, fake: FakeTensorMode
) -> int | None:
    """Most bytes that live at one time while the largest step runs.

    A copy runs: what a model keeps in its attributes would be fake from then on.
    """
    parts = model, config.speculate, config.attention
    try:
        with FakeCopyMode(fake):
            model, speculate, kernel = deepcopy(parts)
        copied = replace(config, speculate=speculate, attention=kernel)
        memory, drafter = open_memory(model, copied, group)
        program = step_program(model, memory, next(iter(config.buckets)), drafter)
        with plain(), Allocations() as used:
            program()
    except Exception:  # a model may do what fake memory does not allow; it is only an estimate
        return None
    peak: int = used.peak_bytes
    return peak


class _Members:
    """A group of which only the size matters: its collectives move nothing."""

    def __init__(self, dcp: DCP) -> None:
        self.size, self.ranks = dcp.size, dcp.ranks

    def all_gather(self, parts: Sequence[Tensor], gathered: Sequence[Tensor]) -> None: ...

    def all_reduce(self, parts: Sequence[Tensor]) -> None: ...

    def reduce_scatter(self, parts: Sequence[Tensor], sums: Sequence[Tensor]) -> None: ...

    def all_to_all(self, parts: Sequence[Tensor], received: Sequence[Tensor]) -> None: ...

    def broadcast(self, parts: Sequence[Tensor]) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...
