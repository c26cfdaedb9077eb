"""Decode Context Parallelism: the KV cache of one sequence over the ranks of a group.

Each rank attends over its shard; the partial outputs are combined by their LSE:

    total = logsumexp_r lse_r            out = sum_r exp(lse_r - total) * out_r

Two ways to do it, on static buffers, the same for a process group and for W shards in one process:

    ag_rs  all-gather the LSE, weight the own output, reduce: [T, H] fp32 and [T, H, D] per rank
    a2a    pack output and LSE into one message per rank, exchange, merge: one collective

Every rank runs every collective in every replay, whatever its shard holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from graphattn.bounds import ceil_div
from graphattn.errors import ConfigError, wrong
from graphattn.groups import Group, ProcessGroup, VirtualGroup
from graphattn.kernels import ops
from graphattn.models.contract import AttentionLayer

Reduce = Literal["ag_rs", "a2a"]


@dataclass(frozen=True, slots=True)
class DCP:
    """Shard the KV cache of every request over `group`.

    `group` is a `torch.distributed` process group or a `VirtualGroup`; `interleave` tokens in a
    row lie on one rank; `reduce` is how partial outputs are combined; `timeout` bounds, in
    seconds, how long a rank of a process group waits for another.
    """

    group: dist.ProcessGroup | VirtualGroup
    interleave: int = 1
    reduce: Reduce = "ag_rs"
    timeout: float = 60.0

    def __post_init__(self) -> None:
        if not isinstance(self.group, VirtualGroup | dist.ProcessGroup):
            raise wrong(
                "group",
                "a torch.distributed process group or a VirtualGroup",
                self.group,
                "Pass torch.distributed.group.WORLD after init_process_group.",
            )
        if not isinstance(self.interleave, int) or self.interleave < 1:
            raise wrong("interleave", "an integer >= 1", self.interleave, "Pass 1, or 16, or 64.")
        if self.reduce not in ("ag_rs", "a2a"):
            raise wrong("reduce", "'ag_rs' or 'a2a'", self.reduce, "Pass one of the two.")
        if not isinstance(self.timeout, int | float) or not self.timeout > 0:
            raise wrong("timeout", "seconds > 0", self.timeout, "Pass 60.0.")

    @property
    def size(self) -> int:
        """W, the number of ranks."""
        return self.group.size if isinstance(self.group, VirtualGroup) else self.group.size()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those of this process."""
        group = self.group
        return group.ranks if isinstance(group, VirtualGroup) else (group.rank(),)

    def open(self) -> VirtualGroup | ProcessGroup:
        """The group's collectives; a call by every rank."""
        if isinstance(self.group, VirtualGroup):
            return self.group
        return ProcessGroup(self.group, self.timeout)


class Combine(Protocol):
    """Combines the partial attention of the ranks of this process into the whole."""

    def __call__(
        self, outs: Sequence[Tensor], lses: Sequence[Tensor], sinks: Tensor | None, *, sharded: bool
    ) -> Tensor:
        """Attention over all shards.

        outs [T, H, D] and lses [T, H] (fp32), one per rank of this process. Returns [T, H, D], or
        [T, H / W, D], this rank's heads, when `sharded`; in a buffer that the next call overwrites.
        """
        ...


class _Buffers:
    """Static memory of one kind of message, one flat buffer per rank of this process."""

    def __init__(self, count: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._flat = [torch.zeros(size, dtype=dtype, device=device) for _ in range(count)]

    def view(self, *shape: int) -> list[Tensor]:
        size = 1
        for n in shape:
            size *= n
        return [flat[:size].view(shape) for flat in self._flat]


class GatherAndReduce:
    """`ag_rs`: all-gather the LSE, weight, then all-reduce, or reduce-scatter over heads."""

    def __init__(
        self,
        group: Group,
        layers: Sequence[AttentionLayer],
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        count = len(group.ranks)
        self._group = group
        heads = max(x.num_q_heads for x in layers)
        width = max(x.num_q_heads * x.out_dim for x in layers)
        self._lses = _Buffers(count, group.size * max_tokens * heads, torch.float32, device)
        self._scaled = _Buffers(count, max_tokens * width, dtype, device)
        self._sums = _Buffers(count, max_tokens * ceil_div(width, group.size), dtype, device)

    def __call__(
        self, outs: Sequence[Tensor], lses: Sequence[Tensor], sinks: Tensor | None, *, sharded: bool
    ) -> Tensor:
        """See `Combine`."""
        tokens, heads, dim = outs[0].shape
        slices = self._group.size if sharded else 1
        gathered = self._lses.view(self._group.size, tokens, heads)
        scaled = self._scaled.view(slices, tokens, heads // slices, dim)
        self._group.all_gather(lses, gathered)
        for out, lse, every, target in zip(outs, lses, gathered, scaled, strict=True):
            ops.scale_partial(out, lse, every, sinks, target)
        if not sharded:
            self._group.all_reduce(scaled)
            return scaled[0][0]
        sums = self._sums.view(tokens, heads // slices, dim)
        self._group.reduce_scatter(scaled, sums)
        return sums[0]


class ExchangeAndMerge:
    """`a2a`: one packed message per rank, merged where it arrives."""

    def __init__(
        self,
        group: Group,
        layers: Sequence[AttentionLayer],
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        count, lse_values = len(group.ranks), 4 // dtype.itemsize
        size = max(
            group.size * ceil_div(max_tokens * x.num_q_heads, group.size) * (x.out_dim + lse_values)
            for x in layers
        )
        self._group = group
        self._lse_values = lse_values
        self._sent = _Buffers(count, size, dtype, device)
        self._received = _Buffers(count, size, dtype, device)
        self._merged = _Buffers(count, size // group.size, dtype, device)
        self._gathered = _Buffers(count, size, dtype, device)

    def __call__(
        self, outs: Sequence[Tensor], lses: Sequence[Tensor], sinks: Tensor | None, *, sharded: bool
    ) -> Tensor:
        """See `Combine`."""
        W = self._group.size
        tokens, heads, dim = outs[0].shape
        rows = ceil_div(tokens * heads, W)
        sent = self._sent.view(W, rows, dim + self._lse_values)
        received = self._received.view(W, rows, dim + self._lse_values)
        merged = self._merged.view(rows, dim)
        for out, lse, message in zip(outs, lses, sent, strict=True):
            ops.pack_partial(out, lse, message, sharded)
        self._group.all_to_all(sent, received)
        for rank, message, piece in zip(self._group.ranks, received, merged, strict=True):
            own = sinks
            if sharded and sinks is not None:
                own = sinks[rank * heads // W : (rank + 1) * heads // W]
            ops.merge_packed(message, own, piece, 0 if sharded else rank * rows)
        if sharded:
            return merged[0].view(tokens, heads // W, dim)
        gathered = self._gathered.view(W, rows, dim)
        self._group.all_gather(merged, gathered)
        return gathered[0].view(W * rows, dim)[: tokens * heads].view(tokens, heads, dim)


class HeadGather:
    """Collects the query heads of all ranks where they are sharded."""

    def __init__(
        self,
        group: Group,
        layers: Sequence[AttentionLayer],
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        size = max_tokens * max(x.num_q_heads * x.head_dim for x in layers)
        self._group = group
        self._own = _Buffers(1, size, dtype, device)
        self._gathered = _Buffers(1, size, dtype, device)
        self._whole = _Buffers(1, size, dtype, device)

    def __call__(self, q: Tensor) -> Tensor:
        """q [T, H / W, D] of this rank; returns [T, H, D] in a buffer of its own."""
        W, (tokens, heads, dim) = self._group.size, q.shape
        (own,) = self._own.view(tokens, heads, dim)
        (gathered,) = self._gathered.view(W, tokens, heads, dim)
        (whole,) = self._whole.view(tokens, W * heads, dim)
        own.copy_(q)
        self._group.all_gather([own], [gathered])
        whole.view(tokens, W, heads, dim).copy_(gathered.transpose(0, 1))
        return whole


class ContextParallel:
    """A group with the static buffers of its messages, as attention uses it."""

    def __init__(
        self,
        group: Group,
        reduce: Reduce,
        layers: Sequence[AttentionLayer],
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.group = group
        kind = GatherAndReduce if reduce == "ag_rs" else ExchangeAndMerge
        self.combine: Combine = kind(self.group, layers, max_tokens, dtype, device)
        self.gather = HeadGather(self.group, layers, max_tokens, dtype, device)

    def heads_sharded(self, q: Tensor, layer: AttentionLayer) -> bool:
        """Whether `q` [T, heads, D] holds only this rank's share of the layer's query heads.

        Raises `ConfigError` unless it holds all of them or exactly the share.
        """
        heads, whole, size = q.shape[1], layer.num_q_heads, self.group.size
        if heads == whole:
            return False
        share = whole // size if whole % size == 0 else None
        if heads == share and len(self.group.ranks) == 1:
            return True
        raise ConfigError(
            f"q: wanted {whole}{f' or {share}' if share else ''} query heads on each of {size} "
            f"ranks, got {heads}. Replicate the heads over the group or shard them evenly over "
            "a process group."
        )
