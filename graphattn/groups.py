"""Ranks and their collectives: W shards in one process, or one rank of a process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from graphattn.errors import wrong


class Group(Protocol):
    """Ranks that hold one cache. A call takes one tensor per rank that this process holds.

    Inputs and outputs are static buffers of the caller; all W ranks make the same calls in the
    same order.
    """

    @property
    def size(self) -> int:
        """W, the number of ranks."""
        ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of this process, ascending."""
        ...

    def all_gather(self, parts: Sequence[Tensor], gathered: Sequence[Tensor]) -> None:
        """gathered [W, ...] = every rank's part [...]."""
        ...

    def all_reduce(self, parts: Sequence[Tensor]) -> None:
        """Each part becomes the sum over all ranks."""
        ...

    def reduce_scatter(self, parts: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        """sums [...] of rank r = the sum over all ranks of part[r], part [W, ...]."""
        ...

    def all_to_all(self, parts: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """received[s] of rank r = part[r] of rank s, both [W, ...]."""
        ...

    def broadcast(self, parts: Sequence[Tensor]) -> None:
        """Each part becomes rank 0's."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...

    def abort(self) -> None:
        """End collectives that wait for a rank that will not come."""
        ...


class VirtualGroup:
    """W ranks in one process: their pools, metadata and partials exist W times, the model once.

    For tests and for trying a layout on one device; it brings no capacity.
    """

    def __init__(self, size: int) -> None:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise wrong("size", "an integer >= 1", size, "Pass the number of ranks.")
        self.size = size
        self.ranks = tuple(range(size))

    def all_gather(self, parts: Sequence[Tensor], gathered: Sequence[Tensor]) -> None:
        """See `Group`."""
        for target in gathered:
            for r, part in enumerate(parts):
                target[r].copy_(part)

    def all_reduce(self, parts: Sequence[Tensor]) -> None:
        """See `Group`; summed in the order of the ranks."""
        for part in parts[1:]:
            parts[0].add_(part)
        for part in parts[1:]:
            part.copy_(parts[0])

    def reduce_scatter(self, parts: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        """See `Group`; summed in the order of the ranks."""
        for r, total in enumerate(sums):
            total.copy_(parts[0][r])
            for part in parts[1:]:
                total.add_(part[r])

    def all_to_all(self, parts: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """See `Group`."""
        for r, target in enumerate(received):
            for s, part in enumerate(parts):
                target[s].copy_(part[r])

    def broadcast(self, parts: Sequence[Tensor]) -> None:
        """See `Group`."""
        for part in parts[1:]:
            part.copy_(parts[0])

    def close(self) -> None:
        """Nothing to leave."""

    def abort(self) -> None:
        """Nothing waits."""


_library = torch.library.Library("graphattn_dcp", "DEF")
_GROUPS: dict[str, dist.ProcessGroup] = {}  # what the collectives' group names stand for


def _collective(name: str, schema: str, run: Callable[..., None]) -> Callable[..., None]:
    """A collective as one op with a true mutation schema: recorded, audited, captured as one."""
    _library.define(f"{name}({schema}) -> ()")
    _library.impl(name, run, "CPU")
    _library.impl(name, run, "CUDA")
    torch.library.register_fake(f"graphattn_dcp::{name}", lambda *args: None, lib=_library)
    op: Callable[..., None] = getattr(torch.ops.graphattn_dcp, name).default
    return op


def _reduce_scatter(total: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
    """The name that this version of torch does not warn about."""
    call = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    call(total.view(-1), part.view(-1), group=group)


def _all_gather(gathered: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
    call = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    call(gathered.view(-1), part.view(-1), group=group)


_all_gather_op = _collective(
    "all_gather",
    "Tensor part, str group, Tensor(a!) gathered",
    lambda part, group, gathered: _all_gather(gathered, part, _GROUPS[group]),
)
_all_reduce_op = _collective(
    "all_reduce",
    "Tensor(a!) part, str group",
    lambda part, group: _discard(dist.all_reduce(part, group=_GROUPS[group])),
)
_reduce_scatter_op = _collective(
    "reduce_scatter",
    "Tensor part, str group, Tensor(a!) total",
    lambda part, group, total: _reduce_scatter(total, part, _GROUPS[group]),
)
_all_to_all_op = _collective(
    "all_to_all",
    "Tensor part, str group, Tensor(a!) received",
    lambda part, group, received: _discard(
        dist.all_to_all_single(received, part, group=_GROUPS[group])
    ),
)
_broadcast_op = _collective(
    "broadcast",
    "Tensor(a!) part, str group",
    lambda part, group: _discard(dist.broadcast(part, group_src=0, group=_GROUPS[group])),
)


def _discard(result: object) -> None:
    """A synchronous collective's result is its side effect."""


class ProcessGroup:
    """This process's rank of a `torch.distributed` group (gloo on a CPU, NCCL on a GPU)."""

    def __init__(self, members: dist.ProcessGroup, timeout: float) -> None:
        """Opens a group of its own over the same ranks, so that the time-out is ours."""
        group = dist.new_group(
            dist.get_process_group_ranks(members),
            timeout=timedelta(seconds=timeout),
            backend=dist.get_backend(members),
            use_local_synchronization=True,
        )
        assert isinstance(group, dist.ProcessGroup), "this rank is a member"
        self.process_group = group
        self.size = members.size()
        self.ranks = (members.rank(),)
        self._name = self.process_group.group_name
        _GROUPS[self._name] = self.process_group

    def close(self) -> None:
        """Leave the group; every graph that holds its collectives must be closed before."""
        if _GROUPS.pop(self._name, None) is not None:
            dist.destroy_process_group(self.process_group)

    def abort(self) -> None:
        """End collectives that wait for a rank that will not come (NCCL: they never time out)."""
        if dist.get_backend(self.process_group) == "nccl":
            self.process_group.abort()

    def all_gather(self, parts: Sequence[Tensor], gathered: Sequence[Tensor]) -> None:
        """See `Group`."""
        _all_gather_op(parts[0], self._name, gathered[0])

    def all_reduce(self, parts: Sequence[Tensor]) -> None:
        """See `Group`."""
        _all_reduce_op(parts[0], self._name)

    def reduce_scatter(self, parts: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        """See `Group`."""
        _reduce_scatter_op(parts[0], self._name, sums[0])

    def all_to_all(self, parts: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """See `Group`."""
        _all_to_all_op(parts[0], self._name, received[0])

    def broadcast(self, parts: Sequence[Tensor]) -> None:
        """See `Group`."""
        _broadcast_op(parts[0], self._name)
