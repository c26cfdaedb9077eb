"""From a recording to bound calls: every tensor gets its place, every operation its call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .arena import Arena, Lifetime, plan, poison
from .arguments import leaves, mapped
from .calls import bound_call
from .prepack import PackedLinear, PackedWeights, Step, steps_of
from .record import Op, Recording, View

aten = torch.ops.aten


class Binder:
    """Gives every tensor of a recording its place and turns operations into bound calls."""

    def __init__(self, recording: Recording, arena: Arena, weights: PackedWeights) -> None:
        self._recording = recording
        self._arena = arena
        self._weights = weights
        self._packs: dict[int, PackedLinear] = {}
        self._tensors: dict[View, Tensor] = {}
        self._steps = steps_of(recording, weights)
        lifetimes = _lifetimes(recording, self._steps)
        offsets, total = plan(list(lifetimes.values()))
        self._offsets = dict(zip(lifetimes, offsets, strict=True))
        self.memory_bytes = arena.reserve(total) + sum(
            recording.nbytes[number] for number in recording.kept if number in recording.born
        )

    @property
    def packs(self) -> tuple[PackedLinear, ...]:
        """Packed weights of the calls bound so far; refresh them before each replay."""
        return tuple(self._packs.values())

    def calls(self) -> Iterator[tuple[str, str, Callable[[], Any]]]:
        """The calls of a replay, in order: its operation, the way it is replayed, the call.

        Linears that are one call are named as one, with their number.
        """
        for step in self._steps:
            name = str(step.ops[0].func)
            if step.linears:
                many = f"{len(step.ops)} x " if len(step.ops) > 1 else ""
                yield f"packed {many}{name}", "packed", self._packed_call(step)
            else:
                yield name, *self._call(step.ops[0])

    def _packed_call(self, step: Step) -> Callable[[], None]:
        pack = self._weights.packed([w for linear in step.linears for w in linear.weights])
        self._packs[id(pack)] = pack
        x, bias = step.linears[0].x, step.linears[0].bias
        targets = [self._tensor(view) for op in step.ops for view in op.fresh if view is not None]
        return pack.call(self._tensor(x), None if bias is None else self._tensor(bias), targets)

    def _call(self, op: Op) -> tuple[str, Callable[[], Any]]:
        args, kwargs = mapped(View, self._tensor, (op.args, op.kwargs))
        targets = [None if view is None else self._tensor(view) for view in op.fresh]
        if all(target is None for target in targets):
            return "in place", bound_call(op.func, args, kwargs)
        written = _written_directly(op, args, kwargs, targets)
        if written is not None:
            return "out", written
        return "copy", partial(_run_and_copy, op.func._op, args, kwargs, targets)

    def poison(self) -> None:
        """Spoil everything that a replay has to write before it can be read."""
        poison(self._arena.storage)
        for number, storage in self._recording.kept.items():
            if number in self._recording.born:
                poison(storage)

    def _tensor(self, view: View) -> Tensor:
        tensor = self._tensors.get(view)
        if tensor is None:
            storage = self._recording.kept.get(view.storage)
            offset = view.offset
            if storage is None:
                storage = self._arena.storage
                offset += self._offsets[view.storage] // view.dtype.itemsize
            tensor = torch.empty(0, dtype=view.dtype)
            tensor.set_(storage, offset, view.size, view.stride)
            self._tensors[view] = tensor
        return tensor


def _lifetimes(recording: Recording, steps: list[Step]) -> dict[int, Lifetime]:
    """First and last step that uses each storage that the program did not keep."""
    lifetimes: dict[int, Lifetime] = {}
    for i, step in enumerate(steps):
        for leaf in leaves([(op.args, op.kwargs, op.fresh) for op in step.ops]):
            if isinstance(leaf, View) and leaf.storage not in recording.kept:
                first = lifetimes[leaf.storage].first if leaf.storage in lifetimes else i
                lifetimes[leaf.storage] = Lifetime(first, i, recording.nbytes[leaf.storage])
    return lifetimes


def _run_and_copy(func: Any, args: Any, kwargs: Any, targets: list[Tensor | None]) -> None:
    results = leaves(func(*args, **kwargs))
    for target, result in zip(targets, results, strict=True):
        if target is not None:
            target.copy_(result)


def _written_directly(
    op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], targets: list[Tensor | None]
) -> Callable[[], Any] | None:
    """A call that writes the outputs in place instead of allocating them, if there is one."""
    if op.func._schema.is_mutable or not all(isinstance(t, Tensor) for t in targets):
        return None
    packet = op.func.overloadpacket
    if packet in _COPIES:
        return bound_call(aten.copy_.default, (targets[0], args[0]), {})
    overload = _out_overload(op.func)
    if overload is None:
        return None
    func, names = overload
    options = {name: value for name, value in kwargs.items() if name not in _TENSOR_OPTIONS}
    return bound_call(func, args, options | dict(zip(names, targets, strict=True)))


_COPIES = frozenset({aten.clone, aten._to_copy})
_TENSOR_OPTIONS = ("dtype", "layout", "device", "pin_memory")
_out_overloads: dict[Any, tuple[Any, list[str]] | None] = {}


def _out_overload(func: Any) -> tuple[Any, list[str]] | None:
    """The overload of `func` with the same arguments plus outputs, if it has a kernel of its own.

    Generated out variants run the functional one and copy: nothing is gained by them.
    """
    if func not in _out_overloads:
        _out_overloads[func] = _find_out_overload(func) if func.namespace == "aten" else None
    return _out_overloads[func]


def _find_out_overload(func: Any) -> tuple[Any, list[str]] | None:
    wanted = _signature(func, options=False)
    for name in func.overloadpacket.overloads():
        overload = getattr(func.overloadpacket, name)
        outs = [argument for argument in overload._schema.arguments if argument.is_out]
        if (
            outs
            and len(outs) == len(func._schema.returns)
            and all(str(argument.type) == "Tensor" for argument in outs)
            and wanted in (_signature(overload, options=True), _signature(overload, options=False))
            and torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CPU")
        ):
            return overload, [argument.name for argument in outs]
    return None


def _signature(func: Any, *, options: bool) -> list[tuple[str, str]]:
    """Names and types of the arguments that are no outputs, with or without tensor options."""
    return [
        (argument.name, str(argument.type))
        for argument in func._schema.arguments
        if not argument.is_out and (options or argument.name not in _TENSOR_OPTIONS)
    ]
