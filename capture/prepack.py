"""Constant linears of the host backend, with weights packed for oneDNN.

A captured graph freezes the addresses of weights, not their values, so packed copies follow the
version counters of their sources: an in-place update is seen at the next replay and packed
again. Updates that hide from the counter (through `.data`, or by a fused optimizer) show in a
sample of each weight; whoever changes less than that says so with `Graph.weights_changed`.

Linears of one input (query, key and value; gate and up) become one. A weight may also be several
of the model's, one after the other in memory: what is written into either of them is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .record import Op, Recording, View

aten = torch.ops.aten

MIN_ELEMENTS = 1 << 17  # of a product; below, oneDNN's cost per call outweighs what packing saves
SAMPLED = 64  # elements of a weight that are looked at before each replay
PACKED_ROWS = 8  # one layout for all buckets: as fast as layouts made for 1, 32 and 512 rows


@dataclass(frozen=True, slots=True)
class ConstantLinear:
    """An operation that multiplies `x` [T, K] with a constant [N, K], plus `bias` [N].

    `weights` lie there one after the other; mostly it is one.
    """

    x: View
    bias: View | None
    weights: tuple[Tensor, ...]


class PackedWeights:
    """Packed copies of constant weights, shared by the graphs of a family.

    Takes the contiguous 2-D float32 tensors among `weights`. Inference tensors are left out: they
    have no version counter, so a change could not be noticed.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        # by where they start, and width
        self._weights = {_key(w.detach()): w for w in weights if _packable(w)}
        self._packs: dict[tuple[int, ...], PackedLinear] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the packed copies made so far."""
        return sum(pack.nbytes for pack in self._packs.values())

    @property
    def most_bytes(self) -> int:
        """Bytes of the packed copies when linears use all weights that can be packed, small ones
        together with their neighbours."""
        runs: list[list[Tensor]] = []
        end = None
        for key, weight in sorted(self._weights.items()):
            if key != end:
                runs.append([])
            runs[-1].append(weight)
            storage, offset, width = key
            end = (storage, offset + weight.numel(), width)
        large = [run for run in runs if sum(w.numel() for w in run) >= MIN_ELEMENTS]
        return sum(weight.nbytes for run in large for weight in run)

    def match(self, op: Op, recording: Recording) -> ConstantLinear | None:
        """The operation as a linear over one of the weights, or None."""
        if op.func is aten.mm.default:
            bias, (x, transposed) = None, op.args
        elif op.func is aten.addmm.default and not op.kwargs:
            bias, x, transposed = op.args
        else:
            return None
        storage = recording.kept.get(transposed.storage)
        if storage is None or transposed.stride != (1, transposed.size[0]):
            return None
        stacked = self._stacked(storage._cdata, transposed.offset, transposed.size[::-1])
        if stacked is None or x.dtype is not torch.float32 or x.stride != (x.size[1], 1):
            return None
        return ConstantLinear(x, bias, stacked)

    def _stacked(
        self, storage: int, offset: int, size: tuple[int, ...]
    ) -> tuple[Tensor, ...] | None:
        """The weights that fill [N, K] elements there; None for a small one, and for others."""
        rows, width = size
        if rows * width < MIN_ELEMENTS:
            return None
        found: list[Tensor] = []
        while rows > 0:
            weight = self._weights.get((storage, offset, width))
            if weight is None:
                return None
            found.append(weight)
            rows, offset = rows - len(weight), offset + weight.numel()
        return tuple(found) if rows == 0 else None

    def packed(self, weights: Sequence[Tensor]) -> PackedLinear:
        """The packed copy of `weights` stacked along N; made at the first request."""
        key = tuple(map(id, weights))
        if key not in self._packs:
            self._packs[key] = PackedLinear(tuple(weights))
        return self._packs[key]


class PackedLinear:
    """One packed copy of weights [N_i, K] stacked along N."""

    def __init__(self, weights: tuple[Tensor, ...]) -> None:
        self.weights = weights
        self.nbytes = sum(weight.nbytes for weight in weights)
        self._versions: tuple[int, ...] = ()
        self._samples = [_sample(weight) for weight in weights]
        self._packed_samples: list[Tensor] = []
        self.refresh()

    def refresh(self) -> None:
        """Pack again when a weight was written since."""
        versions = tuple([weight._version for weight in self.weights])
        if versions != self._versions or not all(
            map(torch.equal, self._samples, self._packed_samples)
        ):
            stacked = torch.cat([weight.detach() for weight in self.weights])
            self.packed = torch.ops.mkldnn._reorder_linear_weight(stacked, PACKED_ROWS)
            self._packed_samples = [sample.clone() for sample in self._samples]
            self._versions = versions

    def forget(self) -> None:
        """Pack again at the next `refresh`."""
        self._versions = ()

    def call(self, x: Tensor, bias: Tensor | None, targets: Sequence[Tensor]) -> Callable[[], None]:
        """A call that writes x @ weights.T + bias into `targets`, one [T, N_i] per weight."""
        linear = torch.ops.mkldnn._linear_pointwise.default._op
        sizes = [target.shape[1] for target in targets]

        def run_one() -> None:
            targets[0].copy_(linear(x, self.packed, bias, "none", [], ""))

        def run() -> None:
            result = linear(x, self.packed, bias, "none", [], "")
            for target, part in zip(targets, result.split(sizes, 1), strict=True):
                target.copy_(part)

        return run_one if len(targets) == 1 else run


@dataclass(frozen=True, slots=True)
class Step:
    """Operations that are replayed by one call: one as it is, or constant linears as one."""

    ops: list[Op]
    linears: list[ConstantLinear]


def steps_of(recording: Recording, weights: PackedWeights) -> list[Step]:
    """The operations in order, with linears of one input joined.

    A linear joins an earlier one when neither has a bias and no operation between them writes in
    place: then its input is the same there, and its output is not read before.
    """
    steps: list[Step] = []
    joinable: dict[View, Step] = {}
    for op in recording.ops:
        linear = weights.match(op, recording)
        if linear is not None and linear.bias is None and linear.x in joinable:
            joinable[linear.x].ops.append(op)
            joinable[linear.x].linears.append(linear)
            continue
        steps.append(Step([op], [] if linear is None else [linear]))
        if linear is not None and linear.bias is None:
            joinable[linear.x] = steps[-1]
        elif op.func._schema.is_mutable:
            joinable.clear()
    return steps


def _packable(weight: Tensor) -> bool:
    return (
        weight.dim() == 2
        and weight.dtype is torch.float32
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and not weight.is_inference()
    )


def _sample(weight: Tensor) -> Tensor:
    """A view of elements all over the weight, in different rows and columns."""
    flat = weight.detach().view(-1)
    return flat[:: flat.numel() // SAMPLED + 1]


def _key(weight: Tensor) -> tuple[int, int, int]:
    return weight.untyped_storage()._cdata, int(weight.storage_offset()), weight.shape[1]
