"""How many nodes a program would be in a CUDA graph, by the part of it that launches them.

The program runs on a fake CUDA device, so the operations are those that a GPU would be given. An
operation of torch that does work counts as one node; views and bare allocations are none. Some of
torch's operations launch more than one kernel (sorts, grouped products), which shows on a GPU only.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .audit import fake_mode, run_once
from .auditor import Auditor
from .errors import CaptureError
from .record import ALLOCATIONS

Part = TypeVar("Part")
_VIEWS = frozenset({torch.ops.aten._unsafe_view, torch.ops.aten.lift_fresh})  # not by their schema


def count_nodes(
    fn: Callable[[], Any], part: Callable[[], Part], launches: Mapping[str, int]
) -> dict[Part, Counter[str]]:
    """Nodes by operation, for each answer of `part()` at the time.

    `launches` has the kernels of operations that launch several, by name. Raises `CaptureError`
    when `fn` does not run to its end on a fake device, or torch has none.
    """
    counter, auditor = _NodeCounter(part, launches), Auditor(torch.device("cuda"))

    def counted() -> None:
        with counter:
            fn()

    if run_once(auditor, fake_mode("cuda"), counted) is None:
        raise CaptureError("\n".join(map(str, auditor.findings.values())))
    return dict(counter.counts)


class _NodeCounter(TorchDispatchMode, Generic[Part]):
    supports_higher_order_operators = True

    def __init__(self, part: Callable[[], Part], launches: Mapping[str, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: defaultdict[Part, Counter[str]] = defaultdict(Counter)
        self._part, self._launches = part, launches

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if _is_node(func):
            name = str(func.overloadpacket)
            self.counts[self._part()][name] += self._launches.get(name, 1)
        with torch._C.DisableTorchFunction():
            return func(*args, **kwargs or {})


def _is_node(func: Any) -> bool:
    packet = func.overloadpacket
    if func.namespace == "prim":  # asks of a fake tensor, what a real one knows
        return False
    if torch.Tag.inplace_view in func.tags or packet in ALLOCATIONS or packet in _VIEWS:
        return False
    schema = func._schema
    return bool(schema.is_mutable) or any(out.alias_info is None for out in schema.returns)
