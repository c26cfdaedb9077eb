"""Random recordings against the plainest way to say the same."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphattn.profiling.events import Activity, Call, Creation, Kind, Profile, Range
from graphattn.profiling.nesting import Nesting
from graphattn.profiling.places import NO_STAGE, Place, place_of
from graphattn.profiling.report import analyse
from graphattn.profiling.shares import UNATTRIBUTED


def nested(draw: random.Random, thread: int, start: int, end: int, depth: int = 0) -> list[Range]:
    """Ranges in [start, end), one inside the other or behind it."""
    found, at = [], start
    while end - at > 4 and draw.random() < 0.7:
        first = draw.randint(at, end - 2)
        last = draw.randint(first + 1, end)
        name = draw.choice(["model", "layer.1", "attend.1", "mlp", "commit", "capture.decode-2"])
        found.append(Range(name, first, last, thread))
        if depth < 4:
            found += nested(draw, thread, first, last, depth + 1)
        at = last
    return found


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_open_ranges_are_those_that_hold_the_time(seed: int) -> None:
    draw = random.Random(seed)
    ranges = [r for thread in (7, 8) for r in nested(draw, thread, 0, 60)]
    draw.shuffle(ranges)
    nesting = Nesting.of(ranges)
    for thread in (7, 8, 9):
        for time in range(62):
            holding = [r for r in ranges if r.thread == thread and r.start <= time < r.end]
            path = nesting.at(time, thread)
            assert sorted(map(id, path)) == sorted(map(id, holding))
            lengths = [r.end - r.start for r in path]
            assert lengths == sorted(lengths, reverse=True)


PLACES = {
    (): None,
    ("capture.decode-2",): Place("decode-2", NO_STAGE),
    ("capture.decode-2", "prepare"): Place("decode-2", "prepare"),
    ("model", "layer.3", "attend.3"): Place(None, "model", 3, "attend"),
    ("capture.x", "model", "layer.3", "mlp", "up"): Place("x", "model", 3, "mlp/up"),
    ("capture.x", "model", "attend_latent.4"): Place("x", "model", 4, "attend_latent"),
    ("capture.x", "draft", "layer.0"): Place("x", "draft", 0),
    ("capture.x", "draft", "pass"): Place("x", "draft", None, "pass"),
    ("capture.x", "layer.2", "attend.2"): Place("x", "model", 2, "attend"),
    ("outer", "capture.x", "commit"): Place("x", "commit"),
}


@pytest.mark.parametrize(("names", "place"), PLACES.items(), ids=str)
def test_names_say_the_place(names: tuple[str, ...], place: Place | None) -> None:
    assert place_of(names) == place


def random_profile(draw: random.Random) -> Profile:
    """Nodes created anywhere, cloned any number of times, run any number of times, by several
    processes whose nodes and calls have the same numbers."""
    ranges, creations, calls, activities = [], [], [], []
    for process in (1, 2):
        thread = process << 24 | 7
        ranges += nested(draw, thread, 0, 400)
        alive, number = [], 0
        for _ in range(draw.randint(1, 12)):
            number += 1
            time = draw.randint(0, 420)
            creations.append(Creation(time, process, thread, number, None))
            for _ in range(draw.randint(0, 3)):
                number += 1
                creations.append(Creation(500, process, thread, number, number - 1))
            alive.append(number)
        for replay in range(draw.randint(1, 4)):
            launch = Call(
                "cudaGraphLaunch", 600 + replay, 601 + replay, process, thread, replay + 1
            )
            calls.append(launch)
            at = 700 + 100 * replay
            for node in [*alive, 999]:  # 999 was never created
                end = at + draw.randint(0, 5)
                kernel = draw.choice("abc")
                activities.append(Activity(Kind.KERNEL, kernel, at, end, process, replay + 1, node))
                at = end
        outside = Activity(Kind.KERNEL, "alone", 2_000, 2_050, process, 77)
        activities.append(outside)
    draw.shuffle(creations)
    draw.shuffle(activities)
    return Profile("random", ranges, [], calls, activities, [], creations)


def brute_force(profile: Profile) -> dict[tuple[str, int | None, str], int]:
    """Nanoseconds by stage, layer and part: walk up from each node that ran, and look at every
    range whether it holds the time of the creation."""
    sums: dict[tuple[str, int | None, str], int] = defaultdict(int)
    for activity in (x for x in profile.activities if x.node is not None):
        number, created = activity.node, None
        while True:
            own = [
                x for x in profile.creations if (x.process, x.node) == (activity.process, number)
            ]
            if not own:
                break
            created = own[0]
            if created.original is None:
                break
            number = created.original
        place = None
        if created is not None:
            holding = [
                r
                for r in profile.ranges
                if r.thread == created.thread and r.start <= created.time < r.end
            ]
            place = place_of([r.name for r in sorted(holding, key=lambda r: r.start - r.end)])
        key = (place.stage, place.layer, place.part) if place else (UNATTRIBUTED, None, "")
        sums[key] += activity.duration
    return dict(sums)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**9))
def test_shares_equal_brute_force_and_add_up(seed: int) -> None:
    profile = random_profile(random.Random(seed))
    report, replays = analyse(profile)
    found: dict[tuple[str, int | None, str], int] = defaultdict(int)
    for share in report.shares:
        found[share.stage, share.layer, share.part] += share.ns
    assert dict(found) == brute_force(profile)
    replayed = [x for x in profile.activities if x.node is not None]
    assert report.total == sum(report.stages().values()) == sum(x.duration for x in replayed)
    assert sum(share.count for share in report.shares) == len(replayed)
    assert sum(len(replay.nodes) for replay in replays) == len(replayed)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_idle_time_is_counted_nanosecond_by_nanosecond(seed: int) -> None:
    draw = random.Random(seed)
    thread, at = 1 << 24 | 7, 10
    calls, activities, launches = [], [], []
    for correlation in range(1, draw.randint(3, 7)):
        start = at + draw.choice([0, draw.randint(0, 30)])
        at = start + draw.randint(1, 12)
        activities.append(Activity(Kind.KERNEL, "a", start, at, 1, correlation, correlation))
        launched = draw.randint(max(0, start - 25), start)
        launches.append(Call("cudaGraphLaunch", launched, launched, 1, thread, correlation))
    launches.sort(key=lambda x: x.start)  # in the order in which they run
    for number, launch in enumerate(launches, 1):
        calls.append(Call(launch.name, launch.start, launch.end, 1, thread, number))
    for _ in range(draw.randint(0, 6)):
        start = draw.randint(0, at)
        activities.append(Activity(Kind.COPY, "copy", start, start + draw.randint(0, 20), 1, 100))
        start = draw.randint(0, at)
        calls.append(Call("cudaFree", start, start + draw.randint(0, 15), 1, thread, 200))
    draw.shuffle(activities)
    report, replays = analyse(Profile("random", [], [], calls, activities, [], []))
    others = [x for x in activities if x.node is None]
    for gap, before, after in zip(report.gaps, replays, replays[1:], strict=False):
        free = [
            t
            for t in range(before.end, after.start)
            if not any(x.start <= t < x.end for x in others)
        ]
        assert gap.idle == len(free)
        assert after.launch is not None
        late = range(before.end, after.launch.start)
        assert gap.late == len(late)
        frees = [
            t for t in late if any(c.name == "cudaFree" and c.start <= t < c.end for c in calls)
        ]
        assert gap.host.get("cudaFree", 0) == len(frees)
        assert sum(gap.host.values()) == len(late)
