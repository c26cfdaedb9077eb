"""Which memory comes into being while code runs, at which line, and what of it is kept."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .source import Place, user_place
from .storages import Storages, has_storage, tensors_in


class Births(TorchDispatchMode):
    """Notes births while it is active, and then tells what is alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = Storages()
        self._places: dict[int, Place] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = {self._number(t) for t in tensors_in((args, kwargs or {})) if has_storage(t)}
        output = func(*args, **(kwargs or {}))
        for tensor in filter(has_storage, tensors_in(output)):
            if (number := self._number(tensor)) not in given:
                self._places.setdefault(number, user_place())
        return output

    def _number(self, tensor: Tensor) -> int:
        return self._storages.number(tensor.untyped_storage())

    def kept(self) -> list[tuple[Place, int]]:
        """What is still alive: the line that made it, and its bytes."""
        alive = ((place, self._storages.alive(n)) for n, place in self._places.items())
        return [(place, storage.nbytes()) for place, storage in alive if storage is not None]
