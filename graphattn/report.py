"""What an engine says of itself: counters while it runs, and what its capture made."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from graphattn._capture.graph import Graph
from graphattn.config import Bucket
from graphattn.difference import ReportDiff, difference
from graphattn.errors import wrong
from graphattn.footprint import Footprint
from graphattn.outbox import Outbox
from graphattn.runner import Runner
from graphattn.scheduler import Scheduler
from graphattn.tables import size_text, table

Progress = Callable[[str, int, int], None]  # name of a bucket, done, total


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters since capture, and the state of the moment."""

    steps: int  # launched
    graph_hits: int  # steps that were a replay
    fallbacks: int  # steps that had to run without their graph
    in_flight: int  # launched and unread
    tokens_emitted: int  # read from the output ring
    tokens_drafted: int  # draft tokens that were verified
    tokens_accepted: int  # of them, right and emitted
    accepted_by_place: tuple[int, ...]  # [k] how often the first, second, ... draft was accepted
    drafted_by_place: tuple[int, ...]  # [k] how often there was a first, second, ... draft
    requests_submitted: int
    requests_finished: int  # including cancelled ones
    running: int
    waiting: int
    preemptions: int  # of requests, that waited again for pages
    prompt_tokens_reused: int  # whose KV earlier requests had left
    pages_free: int
    pages_cached: int  # held by nobody, kept for a prefix that may come again
    pages_taken: int
    events_pending: int  # waiting for poll()


def engine_stats(
    scheduler: Scheduler, outbox: Outbox, *, steps: int, graph_hits: int, **counters: int
) -> Stats:
    """The engine's own counters beside what its scheduler and its outbox count."""
    return Stats(
        steps=steps,
        graph_hits=graph_hits,
        fallbacks=steps - graph_hits,
        tokens_emitted=outbox.emitted,
        requests_finished=outbox.ended,
        events_pending=len(outbox),
        tokens_drafted=sum(scheduler.drafted),
        tokens_accepted=sum(scheduler.accepted),
        accepted_by_place=tuple(scheduler.accepted),
        drafted_by_place=tuple(scheduler.drafted),
        running=scheduler.running,
        waiting=scheduler.waiting,
        preemptions=scheduler.preemptions,
        prompt_tokens_reused=scheduler.reused,
        pages_free=scheduler.pages.free,
        pages_cached=scheduler.pages.cached,
        pages_taken=scheduler.pages.taken,
        **counters,
    )


@dataclass(frozen=True, slots=True)
class BucketReport:
    """One captured graph. Numbers by name: of nodes, over the whole graph."""

    name: str
    tokens: int  # token places
    nodes: int
    kinds: Mapping[str, int]  # nodes by kind; on a CPU by the way they are replayed
    operations: Mapping[str, int]  # nodes by kernel; on a CPU by torch operation
    copies: Mapping[str, int]  # copies by direction; none on a CPU
    host_nodes: int  # that call the host at every replay
    capture_seconds: float
    instantiate_seconds: float  # of them
    memory_bytes: int  # that its capture added
    replays: int
    faults: tuple[str, ...]  # nodes that a static step must not have, in words


@dataclass(frozen=True, slots=True)
class LayerNodes:
    """Nodes that a decoder layer has in the graph of a decode step on a GPU.

    `experts` are those of a layer with experts: router, routed and shared ones, and their sum. They
    are not among the others.
    """

    layer: int
    nodes: int
    unfused: int  # as the model has it, without fused operations
    experts: int
    operations: Mapping[str, int]  # nodes by operation


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What was captured and what it costs. `str()` gives a table, `details()` the operations."""

    backend: str
    device: str
    layers: int  # attention layers of the model
    max_batch: int
    max_seq_len: int
    max_tokens: int
    page_size: int
    num_pages: int
    kv_dtype: str
    kv_bytes: int  # all pages
    kv_bytes_per_token: int
    partial_traffic: float  # bytes of partials over bytes of KV of split decode rows, at most
    state_bytes: int  # slot state, metadata, workspaces, input and output blocks
    predicted: Footprint  # bytes by part, as they could be known before capture; graphs: not
    measured: Footprint
    capture_seconds: float
    steps: int  # launched
    fallbacks: int  # of them without their graph
    buckets: tuple[BucketReport, ...]
    notes: tuple[str, ...]
    layer_nodes: tuple[LayerNodes, ...] = ()  # counted by `graphattn inspect`

    def __str__(self) -> str:
        """The report as text, a line per bucket."""
        head = [
            f"graphattn engine: backend {self.backend} on {self.device}, "
            f"{self.max_batch} slots, sequences up to {self.max_seq_len}, "
            f"steps up to {self.max_tokens} tokens",
            f"KV: {self.num_pages} pages of {self.page_size} in {self.kv_dtype}, "
            f"{size_text(self.kv_bytes)}, {size_text(self.kv_bytes_per_token)} per token; "
            f"state and metadata {size_text(self.state_bytes)}",
            f"splits of decode rows: partials at most {self.partial_traffic:.1%} of the KV traffic",
        ]
        rows = [("bucket", "tokens", "nodes", "capture s", "memory", "replays")]
        rows += [
            (
                b.name,
                str(b.tokens),
                str(b.nodes),
                f"{b.capture_seconds:.2f}",
                size_text(b.memory_bytes),
                str(b.replays),
            )
            for b in self.buckets
        ]
        total = f"captured {len(self.buckets)} graphs in {self.capture_seconds:.1f} s"
        served = f"{self.steps} steps, {self.fallbacks} of them without their graph"
        faults = [f"{b.name}: {fault}" for b in self.buckets for fault in b.faults]
        return "\n".join([*head, *table(rows), total, served, *faults, *self.notes])

    def details(self) -> str:
        """Memory, predicted and measured, the nodes of every graph, and of each layer, as tables.

        "per layer" is the number in the largest graph over the number of attention layers: nodes
        outside the layers, and a drafter's, are counted in it.
        """
        measured = self.measured.sizes()
        memory = [("bytes", "predicted", "measured")]
        memory += [
            (part, _number(size), _number(measured[part]))
            for part, size in self.predicted.sizes().items()
        ]
        columns = [node_counts(bucket) for bucket in self.buckets]
        names = sorted({name for column in columns for name in column})
        nodes = [("nodes", *(b.name for b in self.buckets), "per layer")]
        nodes += [
            (
                name,
                *(str(column.get(name, 0)) for column in columns),
                f"{columns[-1].get(name, 0) / self.layers:.2f}",
            )
            for name in names
        ]
        return "\n".join([*table(memory), "", *table(nodes), *_layer_table(self.layer_nodes)])

    def data(self) -> dict[str, Any]:
        """All of it in plain types: buckets by name, notes as a list."""
        buckets = {b.name: asdict(b) for b in self.buckets}
        return asdict(self) | {"buckets": buckets, "notes": list(self.notes)}

    def to_json(self) -> str:
        """`data` as one object."""
        return json.dumps(self.data(), indent=2)

    def diff(self, other: EngineReport) -> ReportDiff:
        """What `other` says differently: `before.diff(after)`."""
        return difference(self.data(), other.data())


def _layer_table(layers: Sequence[LayerNodes]) -> list[str]:
    """Layers that are alike in one row."""
    if not layers:
        return []
    alike: dict[tuple[int, ...], list[LayerNodes]] = {}
    for x in layers:
        alike.setdefault((x.nodes, x.unfused, x.experts), []).append(x)
    rows: list[tuple[str, ...]] = [
        ("a layer on a GPU", "layers", "nodes", "unfused", "experts apart")
    ]
    rows += [
        (f"like layer {group[0].layer}", str(len(group)), *map(str, numbers))
        for numbers, group in alike.items()
    ]
    firsts = [group[0] for group in alike.values()]
    operations = [
        f"layer {x.layer}: " + ", ".join(f"{n} {name}" for name, n in x.operations.items())
        for x in firsts
    ]
    return ["", *table(rows), *operations]


def node_counts(bucket: BucketReport) -> dict[str, int]:
    """Rows of the table of nodes: kinds, directions of copies, operations."""
    kinds = {f"  {kind}": count for kind, count in bucket.kinds.items()}
    copies = {f" {way}": count for way, count in bucket.copies.items()}
    return kinds | copies | dict(bucket.operations)


def bucket_report(bucket: Bucket, graph: Graph, replays: int) -> BucketReport:
    """Of one captured graph."""
    info = graph.info
    return BucketReport(
        name=bucket.name,
        tokens=bucket.tokens,
        nodes=info.node_count,
        kinds=info.kinds,
        operations=info.operations,
        copies=info.copies,
        host_nodes=info.kinds.get("host", 0),
        capture_seconds=info.capture_seconds,
        instantiate_seconds=info.instantiate_seconds,
        memory_bytes=info.memory_bytes,
        replays=replays,
        faults=info.faults,
    )


def engine_report(runner: Runner) -> EngineReport:
    """Of an engine's device side."""
    config, memory, graphs = runner.config, runner.memory, runner.graphs
    bounds, ranks = config.bounds, len(memory.target.shards)
    kv_bytes = sum(pool.numel() * pool.itemsize for pool in runner.pools().values())
    return EngineReport(
        backend=config.backend,
        device=str(config.device),
        layers=len(memory.target.attention.layers),
        max_batch=bounds.max_batch,
        max_seq_len=bounds.max_seq_len,
        max_tokens=bounds.max_tokens,
        page_size=bounds.page_size,
        num_pages=bounds.num_pages,
        kv_dtype=str(memory.target.shards[0].pools.keys[0].dtype).removeprefix("torch."),
        kv_bytes=kv_bytes,
        kv_bytes_per_token=kv_bytes // (bounds.num_pages * bounds.page_size * ranks),
        partial_traffic=memory.target.partial_traffic(),
        state_bytes=sum(t.numel() * t.itemsize for t in memory.tensors().values()),
        predicted=runner.predicted,
        measured=runner.measured(),
        capture_seconds=runner.capture_seconds,
        steps=runner.steps,
        fallbacks=runner.steps - sum(runner.replays.values()),
        buckets=tuple(bucket_report(b, graphs[b], runner.replays[b]) for b in sorted(graphs)),
        notes=config.notes,
    )


def reporter(progress: bool | Progress) -> Progress | None:
    """The callable of `capture`'s argument `progress`; `ConfigError` for anything else."""
    if callable(progress):
        return progress
    if not isinstance(progress, bool):
        raise wrong("progress", "True, False or a callable", progress, "Pass a bool.")
    return _print_progress if progress else None


def _print_progress(name: str, done: int, total: int) -> None:
    print(f"capturing {name}: {done}/{total}", file=sys.stderr, flush=True)


def _number(size: int | None) -> str:
    return "-" if size is None else f"{size:,}"
