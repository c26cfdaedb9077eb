"""How much memory code takes while it runs: what stays, by owner, and the most at one time.

On fake memory this is a prediction: nothing is allocated, every size is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from .arguments import mapped
from .storages import has_storage, tensors_in


class Allocations(TorchDispatchMode):
    """Counts the storages that come into being while it is active.

    `owner` names who allocates, called at each birth. `peak_bytes` is the most that lived at one
    time of what was born here, as torch operations show it: what they use inside is not seen.
    Inside a `FakeTensorMode` real tensors are taken for memory that was there before.
    """

    def __init__(self, owner: Callable[[], str] = lambda: "") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner
        self._given: dict[int, StorageWeakRef] = {}  # a reference keeps the number from coming back
        self._live: dict[int, tuple[StorageWeakRef, str, int]] = {}
        self._bytes = 0  # of `_live`
        self.peak_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = self._faked((args, kwargs or {}))
        for tensor in filter(has_storage, tensors_in((args, kwargs))):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._live and storage._cdata not in self._given:
                self._given[storage._cdata] = StorageWeakRef(storage)
        output = func(*args, **kwargs)
        for tensor in filter(has_storage, tensors_in(output)):
            self._note(tensor)
        return output

    def kept(self) -> dict[str, int]:
        """Bytes of what is still alive, by owner."""
        self._forget_dead()
        totals: Counter[str] = Counter()
        for _, owner, nbytes in self._live.values():
            totals[owner] += nbytes
        return dict(totals)

    def _faked(self, arguments: Any) -> Any:
        mode = detect_fake_mode()
        if not isinstance(mode, FakeTensorMode):
            return arguments

        def faked(tensor: Tensor) -> Tensor:
            return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)

        return mapped(Tensor, faked, arguments)

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._given or storage._cdata in self._live:
            return
        reference, nbytes = StorageWeakRef(storage), storage.nbytes()
        self._live[storage._cdata] = reference, self._owner(), nbytes
        self._bytes += nbytes
        if self._bytes > self.peak_bytes:
            self._forget_dead()
            self.peak_bytes = max(self.peak_bytes, self._bytes)

    def _forget_dead(self) -> None:
        """Weak references hold the numbers of dead storages, so that none was given twice."""
        dead = [number for number, (reference, *_) in self._live.items() if reference.expired()]
        for number in dead:
            self._bytes -= self._live.pop(number)[2]
