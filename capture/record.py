"""Record every torch operation of a program while it runs on the host.

The program runs once. What it writes into memory that existed before is saved before the first
write and restored afterwards, as are the random states, so that recording leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, UntypedStorage
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .arguments import leaves, mapped
from .compiled import plain
from .errors import RefusedError
from .rules import (
    GRADIENT,
    HOST_DATA,
    HOST_READ,
    LAZY_BITS,
    OPAQUE_RESULT,
    Rule,
    rule_for_function,
    rule_for_op,
)
from .source import Place, called_by_library, user_place
from .storages import (
    Preserved,
    Storages,
    has_storage,
    mutated,
    random_state_preserved,
    tensors_in,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class View:
    """How a tensor lies in a storage of the recording (size, stride, offset in elements)."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Op:
    """One recorded operation: tensors of `args` and `kwargs` are `View`s.

    `fresh` holds the view of each output tensor that has memory of its own, None for outputs
    that alias an argument.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fresh: tuple[View | None, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class Recording:
    """The operations of a program and the memory that they use.

    `kept` are the storages that outlive the program by their number: those that existed before
    and those that the program returned or keeps somewhere. All others, the intermediates, are
    gone; `nbytes` tells their size.
    """

    ops: tuple[Op, ...]
    kept: dict[int, UntypedStorage]
    born: frozenset[int]
    nbytes: tuple[int, ...]
    inference: bool

    def mode(self) -> AbstractContextManager[Any]:
        """The gradient mode in which the operations were recorded."""
        return grad_mode(self.inference)


def grad_mode(inference: bool) -> AbstractContextManager[Any]:
    """Inference mode, or else no gradients."""
    return torch.inference_mode() if inference else torch.no_grad()


def record(
    fn: Callable[[], T], *, untouched: Iterable[Tensor] = ()
) -> tuple[T, Callable[[], Recording]]:
    """Run `fn` once; return its outputs and a function that finishes the recording.

    Finish it when nothing but the program's own outputs holds intermediates any more.
    """
    inference = torch.is_inference_mode_enabled()
    preserved = Preserved(untouched)
    recorder = _Recorder(preserved)
    try:
        with (
            random_state_preserved(torch.device("cpu")),
            grad_mode(inference),
            plain(),
            _FunctionGuard(recorder),
            recorder,
        ):
            outputs = fn()
    finally:
        preserved.restore()
    return outputs, lambda: recorder.finish(inference)


class _FunctionGuard(TorchFunctionMode):
    """Refuses Python entry points that read values or addresses unseen by the dispatcher."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = rule_for_function(func, args)
        if rule is not None and not (func in _USED_BY_TORCH and called_by_library()):
            raise _refused(func, rule)
        allowed = _allowed_inside(func, args, kwargs)
        if allowed is None:
            return func(*args, **kwargs)
        self._recorder.allowed.append(allowed)
        try:
            return func(*args, **kwargs)
        finally:
            self._recorder.allowed.pop()


# Torch's own Python code compares storages; the caller's addresses are not involved.
_USED_BY_TORCH = frozenset({Tensor.untyped_storage, Tensor.storage, Tensor.data_ptr})


def _allowed_inside(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rule | None:
    """The rule that a function breaks on the CPU but keeps on CUDA."""
    if func is Tensor.__setitem__:
        return HOST_DATA  # x[i] = 3.0 makes a scalar tensor here and a fill there
    if func is torch.nn.functional.one_hot:
        classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
        return HOST_READ if classes > 0 else None  # the CPU checks the range of the ids
    return None


def _refused(func: Any, rule: Rule) -> RefusedError:
    name = func if isinstance(func, torch._ops.OpOverload) else torch.overrides.resolve_name(func)
    return RefusedError(str(name or func), user_place(), rule.reason, rule.fix)


class _Recorder(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, preserved: Preserved) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allowed: list[Rule] = []
        self._preserved = preserved
        self._storages = Storages()
        self._existing: dict[int, UntypedStorage] = {}
        self._ops: list[Op] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # A function guard must not see what an implementation does inside one operation.
        with torch._C.DisableTorchFunction():
            rule = rule_for_op(func, args, kwargs)
            if rule is not None and rule not in self.allowed:
                raise _refused(func, rule)
            if torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in((args, kwargs))):
                raise _refused(func, GRADIENT)
            if _is_composite(func):
                with self:
                    result = func.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorded_args, recorded_kwargs = mapped(
            Tensor, lambda tensor: self._view_of(func, tensor), (args, kwargs)
        )
        inputs = {
            leaf.storage
            for leaf in leaves((recorded_args, recorded_kwargs))
            if isinstance(leaf, View)
        }
        if func._schema.is_mutable:
            for tensor in filter(has_storage, mutated(func, args, kwargs)):
                if self._number(tensor) not in self._storages.born:
                    self._preserved.before_write(tensor)
        output = func(*args, **kwargs)
        if func in _HOST_READS_ALLOWED:
            return output
        fresh = tuple(self._fresh(func, leaf, inputs) for leaf in leaves(output))
        if _has_work(func, fresh):
            self._ops.append(Op(func, recorded_args, recorded_kwargs, fresh, user_place()))
        return output

    def _number(self, tensor: Tensor) -> int:
        return self._storages.number(tensor.untyped_storage())

    def _view_of(self, func: Any, tensor: Tensor) -> View | Tensor:
        """View of an argument. Packed weights have no storage and stay what they are."""
        if not has_storage(tensor):
            return tensor
        if tensor.is_conj() or tensor.is_neg():
            raise _refused(func, LAZY_BITS)
        number = self._number(tensor)
        if number not in self._storages.born:
            self._existing.setdefault(number, tensor.untyped_storage())
        return _view(number, tensor)

    def _fresh(self, func: Any, leaf: Any, inputs: set[int]) -> View | None:
        """View of an output that has memory of its own."""
        if not isinstance(leaf, Tensor):
            return None
        if not has_storage(leaf):
            raise _refused(func, OPAQUE_RESULT)
        number = self._number(leaf)
        if number in inputs:
            return None
        self._storages.born.add(number)
        return _view(number, leaf)

    def finish(self, inference: bool) -> Recording:
        kept = dict(self._existing)
        for number in self._storages.born:
            storage = self._storages.alive(number)
            if storage is not None:
                kept[number] = storage
        return Recording(
            ops=tuple(self._ops),
            kept=kept,
            born=frozenset(self._storages.born),
            nbytes=tuple(self._storages.nbytes),
            inference=inference,
        )


_HOST_READS_ALLOWED = frozenset({torch.ops.aten._local_scalar_dense.default})
ALLOCATIONS = frozenset(
    {
        torch.ops.aten.empty,
        torch.ops.aten.empty_like,
        torch.ops.aten.empty_strided,
        torch.ops.aten.new_empty,
        torch.ops.aten.new_empty_strided,
    }
)


def _view(number: int, tensor: Tensor) -> View:
    return View(
        number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
    )


def _is_composite(func: Any) -> bool:
    """Whether the operation reaches us whole only because inference mode skips autograd."""
    return bool(func._can_decompose()) and torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    )


def _has_work(func: Any, fresh: tuple[View | None, ...]) -> bool:
    """Whether a replay must run it: views and bare allocations only describe memory.

    One that returns nothing, such as an assertion, is there for what else it does.
    """
    if torch.Tag.inplace_view in func.tags or func.overloadpacket in ALLOCATIONS:
        return False
    schema = func._schema
    return schema.is_mutable or not schema.returns or any(view is not None for view in fresh)
