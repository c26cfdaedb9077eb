"""Identity of tensor memory while a program runs, and its restoration afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from .arguments import leaves


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors among nested arguments."""
    return (leaf for leaf in leaves(tree) if isinstance(leaf, Tensor))


def has_storage(tensor: Tensor) -> bool:
    """Whether the tensor is plain strided memory (not sparse, not an opaque packed weight)."""
    return tensor.layout is torch.strided and not tensor.is_quantized


def mutated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Tensors that the schema of `func` says are written."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from tensors_in(value)


class Storages:
    """Numbers the storages that a program touches, and tells which of them it created.

    Weak references keep the number of a freed storage from being taken for a new one's.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._references: list[StorageWeakRef] = []
        self.born: set[int] = set()
        self.nbytes: list[int] = []

    def number(self, storage: UntypedStorage) -> int:
        """Number of the storage; a new one when it was not seen before."""
        number = self._numbers.get(storage._cdata)
        if number is None:
            reference = StorageWeakRef(storage)
            number = self._numbers[reference.cdata] = len(self._references)
            self._references.append(reference)
            self.nbytes.append(storage.nbytes())
        return number

    def alive(self, number: int) -> UntypedStorage | None:
        """The storage, or None when nothing holds it any more."""
        return UntypedStorage._new_with_weak_ptr(self._references[number].cdata)


class Preserved:
    """Copies of the storages that a program writes, taken before the first write of each.

    `untouched` are tensors that the caller vouches for: they are neither copied nor restored.
    """

    def __init__(self, untouched: Iterable[Tensor] = ()) -> None:
        self._vouched = {tensor.untyped_storage()._cdata for tensor in untouched}
        self._saved: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}

    def before_write(self, tensor: Tensor) -> None:
        """Save the memory of `tensor` unless it was saved already."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._saved and storage._cdata not in self._vouched:
            self._saved[storage._cdata] = (storage, storage.clone())

    def restore(self) -> None:
        """Put every saved storage back, bit for bit."""
        for storage, copy in self._saved.values():
            storage.copy_(copy)


class PreserveMode(TorchDispatchMode):
    """Saves what the program under it writes into memory that it did not create."""

    supports_higher_order_operators = True

    def __init__(self, preserved: Preserved) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._preserved = preserved
        self._storages = Storages()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            inputs = {
                self._storages.number(tensor.untyped_storage())
                for tensor in tensors_in((args, kwargs))
                if has_storage(tensor)
            }
            if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
                for tensor in filter(has_storage, mutated(func, args, kwargs)):
                    if self._storages.number(tensor.untyped_storage()) not in self._storages.born:
                        self._preserved.before_write(tensor)
            output = func(*args, **kwargs)
            for tensor in tensors_in(output):
                if has_storage(tensor):
                    number = self._storages.number(tensor.untyped_storage())
                    if number not in inputs:
                        self._storages.born.add(number)
        return output


@contextmanager
def random_state_preserved(device: torch.device) -> Iterator[None]:
    """Put the default random states of the CPU and of `device` back afterwards."""
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
