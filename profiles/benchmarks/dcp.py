"""Decode Context Parallelism: what is sent, step time, and KV capacity against W, virtual ranks.

Collectives and bytes of both reductions are counted and must be those of the formula in
docs/dcp.md. Virtual ranks share one processor: their step time shows the extra work, never a gain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor

import graphattn
from graphattn.engine import Engine
from profiles.interleave import Pairs, in_turn
from profiles.record import Record
from profiles.roofline import collective_bytes, sizes, step_work
from profiles.setting import Refused, Setting, tiny_llama
from profiles.workloads import DRY, Workload

RANKS = (1, 2, 4, 8)
LONG = Workload("dcp-8", batch=8, prompt_len=256, new_tokens=42)
Reduce = Literal["ag_rs", "a2a"]


@dataclass(slots=True)
class Traffic:
    """Collectives of one step, and the bytes that each rank sends in them."""

    calls: list[str] = field(default_factory=list)
    sent: float = 0.0


class CountingGroup(graphattn.VirtualGroup):
    """Virtual ranks that count, with the bytes of ring algorithms, per rank."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.traffic = Traffic()

    def all_gather(self, parts: Sequence[Tensor], gathered: Sequence[Tensor]) -> None:
        """Each rank passes W - 1 parts on."""
        self._count("all_gather", parts, self.size - 1)
        super().all_gather(parts, gathered)

    def all_reduce(self, parts: Sequence[Tensor]) -> None:
        """A reduce-scatter and an all-gather of slices."""
        self._count("all_reduce", parts, 2 * (self.size - 1) / self.size)
        super().all_reduce(parts)

    def all_to_all(self, parts: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """All but the own slice leaves."""
        self._count("all_to_all", parts, (self.size - 1) / self.size)
        super().all_to_all(parts, received)

    def broadcast(self, parts: Sequence[Tensor]) -> None:
        """Of the sampled tokens, once per step; on average (W - 1) / W of a message per rank."""
        self._count("broadcast", parts, (self.size - 1) / self.size)
        super().broadcast(parts)

    def _count(self, call: str, parts: Sequence[Tensor], share: float) -> None:
        self.traffic.calls.append(call)
        self.traffic.sent += parts[0].numel() * parts[0].itemsize * share


def measure(setting: Setting) -> Iterator[Record]:
    """Messages and step times of both reductions, then capacities."""
    model, ranks = tiny_llama(512), setting.size(RANKS, (1, 2))
    for reduce in get_args(Reduce):
        for W in ranks[1:]:
            yield messages(model, reduce, W)
        yield from step_times(setting, model, reduce, ranks)
    for W in ranks:
        yield capacity(model, W)


def capture(model: Any, dcp: graphattn.DCP | None, *, backend: str = "host") -> Engine:
    """Eight slots, pages for all of them."""
    return graphattn.capture(
        model, max_batch=8, max_tokens=64, max_seq_len=512, backend=backend, dcp=dcp
    )


def messages(model: Any, reduce: Reduce, W: int) -> Record:
    """Count one decode step of eight rows and hold it against the formula."""
    group, layers = CountingGroup(W), sizes(model).layers
    with capture(model, graphattn.DCP(group, 1, reduce), backend="eager") as engine:
        bucket = engine.config.buckets.decode[-1]
        group.traffic = Traffic()
        engine.step(bucket)
        traffic = group.traffic
        sampled = 4 * engine.config.bounds.logits_places(bucket.tokens) * (W - 1) / W
        itemsize = model.dtype.itemsize
        each = [collective_bytes(x, reduce, W, bucket.tokens, itemsize) for x in layers]
    if traffic.sent != sum(each) + sampled:
        raise Refused(
            f"{reduce} W={W}: counted {traffic.sent} bytes, the formula says {sum(each) + sampled}"
        )
    return {
        "part": "messages",
        "reduce": reduce,
        "W": W,
        "collectives_per_layer": (len(traffic.calls) - 1) / len(layers),
        "bytes_per_layer": each[0],
        "bytes_per_step": traffic.sent,
    }


def step_times(
    setting: Setting, model: Any, reduce: Reduce, ranks: Sequence[int]
) -> Iterator[Record]:
    """Steps of all W in turn, each beside one rank's; tokens must be equal."""
    workload = setting.size(LONG, DRY)
    with ExitStack() as stack:
        engines = [
            stack.enter_context(capture(model, _parallel(W, reduce) if W > 1 else None))
            for W in ranks
        ]
        one, *many = in_turn(engines, workload)
    for W, side in zip(ranks, [one, *many], strict=True):
        pairs = Pairs(side.seconds, one.seconds, side.tokens, one.tokens)
        setting.check(pairs, f"{reduce}, W={W}")
        stages = step_work(sizes(model), workload.lengths, ranks=W, reduce=reduce)
        case = {"part": "step", "reduce": reduce, "W": W, "batch": workload.batch}
        yield case | setting.compared(pairs, "W=1", stages)


def _parallel(W: int, reduce: Reduce) -> graphattn.DCP:
    return graphattn.DCP(graphattn.VirtualGroup(W), 16, reduce)


def capacity(model: Any, W: int) -> Record:
    """Longest sequence with four pages of 64 per rank."""
    dcp = graphattn.DCP(graphattn.VirtualGroup(W)) if W > 1 else None
    options: dict[str, Any] = {"max_batch": 1, "max_tokens": 16, "num_pages": 4, "dcp": dcp}
    with graphattn.capture(model, backend="eager", **options) as engine:
        tokens = engine.config.bounds.max_seq_len
    return {"part": "capacity", "W": W, "pages_per_rank": 4, "kv_tokens": tokens}
