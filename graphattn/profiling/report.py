"""A profile, read and attributed: the text and the JSON of `graphattn profile-report`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from graphattn.errors import wrong
from graphattn.profiling.events import Count, Level, Profile
from graphattn.profiling.findings import Finding, Loop, find
from graphattn.profiling.gaps import Gap, find_gaps
from graphattn.profiling.nesting import Nesting
from graphattn.profiling.places import stage_order
from graphattn.profiling.replays import Replay, find_replays
from graphattn.profiling.shares import (
    UNATTRIBUTED,
    BucketShare,
    Share,
    bucket_shares,
    shares,
)
from graphattn.profiling.units import time_text
from graphattn.tables import table

TOP = 12  # kernels and gaps that the text lists
REST = "rest"  # of a layer, or of a stage outside its layers
GRAPH_LEVEL = (
    "{count} replays were recorded as a whole: no stages and layers of them. Record with "
    "--cuda-graph-trace=node for those, at the price of slower replays"
)


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """`str()` gives the tables, `to_json()` all of it. Times are in nanoseconds."""

    source: str
    loop: int  # from the first launch to the end of the last replay, added up over processes
    processes: int
    buckets: tuple[BucketShare, ...]
    shares: tuple[Share, ...]
    gaps: tuple[Gap, ...]
    counters: dict[str, tuple[int, int, int]]  # smallest, last, largest value
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing was found that slows the loop down."""
        return not self.findings

    @property
    def total(self) -> int:
        """Nanoseconds of all replayed nodes: what the shares add up to."""
        return sum(share.ns for share in self.shares)

    def stages(self) -> dict[str, int]:
        """Nanoseconds by stage, in the order of the step; what is not attributed comes last."""
        return dict(sorted(self._by(lambda x: x.stage).items(), key=lambda x: stage_order(x[0])))

    def layers(self) -> dict[tuple[str, int], dict[str, int]]:
        """Nanoseconds by stage and layer, and in them by part; "rest" is what has no name there."""
        found: dict[tuple[str, int], dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for share in self.shares:
            if share.layer is not None:
                found[share.stage, share.layer][share.part or REST] += share.ns
        ordered = sorted(found.items(), key=lambda x: (stage_order(x[0][0]), x[0][1]))
        return {key: dict(parts) for key, parts in ordered}

    def kernels(self) -> list[tuple[str, str, int, int]]:
        """Name, where (stage and part), nanoseconds, runs; the longest first."""
        sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        for share in self.shares:
            within = "layer" if share.layer is not None else ""
            where = "/".join(filter(None, (share.stage, within, share.part)))
            sums[share.kernel, where][0] += share.ns
            sums[share.kernel, where][1] += share.count
        found = [(kernel, where, ns, count) for (kernel, where), (ns, count) in sums.items()]
        return sorted(found, key=lambda x: (-x[2], x[0]))

    def __str__(self) -> str:
        """Buckets, stages, layers, kernels, gaps, counters, findings and notes."""
        replays = sum(bucket.replays for bucket in self.buckets)
        head = (
            f"profile by {self.source}: {replays} replays in {self.processes} "
            f"process{'es' if self.processes > 1 else ''}, {time_text(self.loop)} of loop"
        )
        parts = [[head], self._buckets()]
        if self.shares:
            parts += [self._stages(), self._layers(), self._kernels()]
        parts += [self._gaps(), self._counters(), self._findings()]
        parts.append([f"note: {note}" for note in self.notes])
        return "\n\n".join("\n".join(part) for part in parts if part)

    def to_json(self) -> str:
        """One object: the fields, `ok`, and sums by stage, layer and kernel."""
        layers = [
            {"stage": stage, "layer": layer, "parts": parts, "ns": sum(parts.values())}
            for (stage, layer), parts in self.layers().items()
        ]
        names = ("kernel", "where", "ns", "count")
        kernels = [dict(zip(names, row, strict=True)) for row in self.kernels()]
        whole: dict[str, Any] = {"ok": self.ok, "total": self.total, "stages": self.stages()}
        whole |= {"layers": layers, "kernels": kernels}
        return json.dumps(whole | asdict(self), indent=2)

    def _by(self, key: Callable[[Share], str]) -> dict[str, int]:
        sums: dict[str, int] = defaultdict(int)
        for share in self.shares:
            sums[key(share)] += share.ns
        return dict(sums)

    def _of_total(self, ns: int) -> tuple[str, str]:
        return time_text(ns), f"{ns / max(1, self.total):.1%}"

    def _buckets(self) -> list[str]:
        rows = [("bucket", "replays", "nodes", "GPU time", "span", "launch", "longest")]
        rows += [
            (
                x.bucket,
                str(x.replays),
                "-" if x.nodes is None else str(x.nodes),
                time_text(x.busy),
                time_text(x.span),
                "-" if x.launch is None else time_text(x.launch),
                "-" if x.launch_max is None else time_text(x.launch_max),
            )
            for x in self.buckets
        ]
        return table(rows)

    def _stages(self) -> list[str]:
        rows = [("stage", "GPU time", "share")]
        rows += [(stage, *self._of_total(ns)) for stage, ns in self.stages().items()]
        return table([*rows, ("all replayed nodes", *self._of_total(self.total))])

    def _layers(self) -> list[str]:
        layers = self.layers()
        if not layers:
            return []
        names = sorted({part for parts in layers.values() for part in parts}, key=_rest_last)
        rows = [("layer", *names, "all", "share")]
        for (stage, layer), parts in layers.items():
            cells = (time_text(parts[name]) if name in parts else "-" for name in names)
            rows.append((f"{stage} {layer}", *cells, *self._of_total(sum(parts.values()))))
        return table(rows)

    def _kernels(self) -> list[str]:
        rows = [("kernel", "in", "runs", "GPU time", "share")]
        rows += [
            (_short(kernel), where, str(count), *self._of_total(ns))
            for kernel, where, ns, count in self.kernels()[:TOP]
        ]
        return table(rows)

    def _gaps(self) -> list[str]:
        worst = sorted(self.gaps, key=lambda x: -x.idle)[:TOP]
        if not worst:
            return []
        rows = [("idle between replays", "idle", "host late", "mostly in")]
        rows += [
            (
                f"{x.after} {x.before_bucket} and {x.after + 1} {x.next_bucket}",
                time_text(x.idle),
                "-" if x.late is None else time_text(x.late),
                next(iter(x.host), "-"),
            )
            for x in worst
        ]
        return table(rows)

    def _counters(self) -> list[str]:
        if not self.counters:
            return []
        rows: list[tuple[str, ...]] = [("counter", "least", "last", "most")]
        rows += [(name, *map(str, values)) for name, values in self.counters.items()]
        return table(rows)

    def _findings(self) -> list[str]:
        if self.ok:
            return ["nothing found that slows the loop down"]
        return [f"{x.kind}: {x.text}" for x in self.findings]


def report_of(profile: Profile) -> ProfileReport:
    """Attribute and sum up. Raises `ConfigError` when no graph was replayed."""
    return analyse(profile)[0]


def analyse(profile: Profile) -> tuple[ProfileReport, list[Replay]]:
    """The report, and the replays that it is about."""
    nesting = Nesting.of(profile.ranges)
    replays = find_replays(profile, nesting)
    if not replays:
        raise wrong(
            "FILE",
            "replays of CUDA graphs",
            f"{len(profile.activities)} pieces of work outside graphs",
            'Capture with backend="cuda", and record some steps after it.',
        )
    loop = Loop.of(replays)
    gaps = find_gaps(profile, replays)
    whole = ProfileReport(
        source=profile.source,
        loop=loop.length,
        processes=len(loop.spans),
        buckets=tuple(bucket_shares(replays, profile.creations)),
        shares=tuple(shares(replays)),
        gaps=tuple(gaps),
        counters=_counters(profile.counts),
        findings=tuple(find(profile, nesting, replays, gaps)),
        notes=(*profile.notes, *_notes(replays)),
    )
    return whole, replays


def _notes(replays: Sequence[Replay]) -> list[str]:
    whole = sum(x.level is Level.GRAPH for x in replays)
    lost = sum(place is None for x in replays for _, place in x.nodes)
    every = sum(len(x.nodes) for x in replays)
    notes = [GRAPH_LEVEL.format(count=whole)] if whole else []
    if lost:
        notes.append(
            f"{lost} of {every} replayed nodes are {UNATTRIBUTED}: no range was open where they "
            "were captured, or their capture lies outside the recording"
        )
    return notes


def _counters(counts: Iterable[Count]) -> dict[str, tuple[int, int, int]]:
    values: dict[str, list[int]] = defaultdict(list)
    for count in sorted(counts, key=lambda x: x.time):
        values[count.name].append(count.value)
    return {name: (min(found), found[-1], max(found)) for name, found in sorted(values.items())}


def _rest_last(part: str) -> tuple[bool, str]:
    return (part == REST, part)


def _short(name: str) -> str:
    return name if len(name) <= 48 else f"{name[:45]}..."
