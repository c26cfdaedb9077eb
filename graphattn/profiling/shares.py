"""Where the time of replayed nodes went: by stage, layer and part, kernel and bucket."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from graphattn.profiling.events import Creation, Level
from graphattn.profiling.places import stage_order
from graphattn.profiling.replays import Replay

UNATTRIBUTED = "unattributed"


@dataclass(frozen=True, slots=True)
class Share:
    """Nodes that belong together: `layer` None outside layers, `part` "" for what has no name."""

    bucket: str
    stage: str
    layer: int | None
    part: str
    kernel: str
    ns: int
    count: int


@dataclass(frozen=True, slots=True)
class BucketShare:
    """The replays of one bucket. Times in nanoseconds, medians; None where nothing was recorded.

    `span` is from the first node's start to the last one's end, `busy` the sum over the nodes,
    `launch` the host's call.
    """

    bucket: str
    replays: int
    nodes: int | None
    total: int  # of busy, over all replays
    busy: int
    span: int
    launch: int | None
    launch_max: int | None


def shares(replays: Iterable[Replay]) -> list[Share]:
    """Every replayed node is in exactly one, so their sum is the time of all nodes."""
    sums: dict[tuple[str, str, int | None, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for replay in replays:
        for activity, place in replay.nodes:
            stage, layer, part = (
                (place.stage, place.layer, place.part) if place else (UNATTRIBUTED, None, "")
            )
            entry = sums[replay.bucket, stage, layer, part, activity.name]
            entry[0] += activity.duration
            entry[1] += 1
    found = [Share(*key, ns, count) for key, (ns, count) in sums.items()]
    return sorted(found, key=lambda x: (stage_order(x.stage), x.layer or 0, -x.ns, x.kernel))


def bucket_shares(replays: Sequence[Replay], creations: Iterable[Creation]) -> list[BucketShare]:
    """The buckets that took the most time first. Where the nodes of replays were not recorded they
    are counted by their creations, if those belong to a single graph."""
    by_bucket: dict[str, list[Replay]] = defaultdict(list)
    for replay in replays:
        by_bucket[replay.bucket].append(replay)
    captured = [x for x in creations if x.original is None]
    alone = len(captured) if captured and len(by_bucket) == 1 else None
    found = [_bucket(name, group, alone) for name, group in by_bucket.items()]
    return sorted(found, key=lambda x: (-x.total, x.bucket))


def _bucket(name: str, replays: Sequence[Replay], captured: int | None) -> BucketShare:
    nodes = [len(x.nodes) for x in replays if x.level is Level.NODE]
    launches = [x.launch.end - x.launch.start for x in replays if x.launch]
    busy = [x.busy for x in replays]
    return BucketShare(
        bucket=name,
        replays=len(replays),
        nodes=max(nodes) if nodes else captured,
        total=sum(busy),
        busy=_median(busy),
        span=_median([x.end - x.start for x in replays]),
        launch=_median(launches) if launches else None,
        launch_max=max(launches, default=None),
    )


def _median(values: Sequence[int]) -> int:
    return round(statistics.median(values))
