"""Recordings of an imaginary engine on an imaginary GPU, as every recorder would write them.

Times are in nanoseconds. A step is known node by node, so its totals are known too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from graphattn.profiling.events import (
    Activity,
    Call,
    Count,
    Creation,
    GraphRun,
    Kind,
    Profile,
    Range,
    Way,
)

HOST_STEP = 20_000  # between the launches that the host makes ahead
BETWEEN = 4_000  # idle time of the device between two replays
COPY = 600


@dataclass(frozen=True)
class Node:
    """One node of a step: the names of the ranges around its capture, kernel, duration."""

    path: tuple[str, ...]
    name: str
    ns: int
    kind: Kind = Kind.KERNEL
    way: Way | None = None


def step_nodes(layers: int = 2) -> list[Node]:
    """A step of a model of `layers` layers."""
    nodes = [
        Node(("admit",), "admit_kernel", 1_000),
        Node(("prepare",), "memset", 400, Kind.SET),
        Node(("prepare",), "prepare_kernel", 2_000),
        Node(("model",), "embedding", 3_000),
    ]
    for i in range(layers):
        layer = ("model", f"layer.{i}")
        nodes += [
            Node(layer, "rms_norm", 900),
            Node(layer, "gemm", 8_000),
            Node((*layer, f"attend.{i}"), "kv_write", 1_100),
            Node((*layer, f"attend.{i}"), "attend_decode", 5_000 + 100 * i),
            Node((*layer, "mlp"), "gemm", 9_000),
        ]
    return [
        *nodes,
        Node(("model",), "gemm", 6_000),
        Node(("sample",), "greedy", 1_500),
        Node(("commit",), "commit_kernel", 700),
    ]


@dataclass
class Recorder:
    """Writes down what one process does, while time goes on."""

    process: int = 1234
    thread: int = 1234 << 24 | 7
    now: int = 10_000  # on the host
    device: int = 0  # when the device is done with all that it was given
    nodes: int = 0
    correlation: int = 0
    ranges: list[Range] = field(default_factory=list)
    counts: list[Count] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    activities: list[Activity] = field(default_factory=list)
    runs: list[GraphRun] = field(default_factory=list)
    creations: list[Creation] = field(default_factory=list)

    def capture(self, bucket: str, step: list[Node], *, at_end: bool = False) -> list[int]:
        """Capture and instantiate; numbers of the executable nodes. `at_end`: the creations are
        noted only when the capture has ended."""
        begin, captured = self.now, []
        self.now += 100
        previous: tuple[str, ...] = ()
        opened: list[tuple[str, int]] = []
        for node in [*step, Node((), "", 0)]:
            shared = 0
            while shared < min(len(previous), len(node.path)) and (
                previous[shared] == node.path[shared]
            ):
                shared += 1
            while len(opened) > shared:
                name, start = opened.pop()
                self.now += 10
                self.ranges.append(Range(name, start, self.now, self.thread))
            for name in node.path[shared:]:
                self.now += 10
                opened.append((name, self.now))
            previous = node.path
            if node.name:
                self.nodes += 1
                captured.append((self.nodes, self.now + 15))
                self.call(LAUNCH_CALLS[node.kind], 20)
        times = {number: self.now if at_end else time for number, time in captured}
        for number, time in times.items():
            self.creations.append(Creation(time, self.process, self.thread, number, None))
        self.call("cudaStreamEndCapture", 50)
        clones = []
        for number in times:
            clones.append(number + 100_000)
            clone = Creation(self.now, self.process, self.thread, clones[-1], number)
            self.creations.append(clone)
        self.call("cudaGraphInstantiate", 5_000)
        self.now += 100
        self.ranges.append(Range(f"capture.{bucket}", begin, self.now, self.thread))
        self.now += 100_000
        self.device = self.now
        return clones

    def replay(self, bucket: str, step: list[Node], clones: list[int], *, rows: int = 8) -> None:
        """One step of the engine: input copy, launch, output copy."""
        self.counts.append(Count("pages_taken", self.now - 60, 4 * rows))
        self.counts.append(Count("live_rows", self.now - 30, rows))
        begin = self.now
        self.within("copy_in", lambda: self.copy(Way.TO_DEVICE, 4_096))
        launch = self.call("cudaGraphLaunch", 5_000)
        self.device = max(self.device + BETWEEN - 2 * COPY, self.now)
        for node, number in zip(step, clones, strict=True):
            self.device = self._run(node, number, launch, self.device)
        self.within("copy_out", lambda: self.copy(Way.TO_HOST, 1_024))
        self.call("cudaEventRecord", 300)
        self.ranges.append(Range(f"replay.{bucket}", begin, self.now, self.thread))
        self.now += HOST_STEP - 9_000

    def wait(self) -> None:
        """The engine waits for the device: its own, named wait."""
        ahead = max(self.device - 60_000, self.now + 100)
        begin = self.now
        self.call("cudaEventSynchronize", ahead - self.now)
        self.ranges.append(Range("wait", begin, self.now, self.thread))
        self.now += 1_000

    def within(self, name: str, act: object) -> None:
        begin = self.now
        act()  # type: ignore[operator]
        self.now += 20
        self.ranges.append(Range(name, begin, self.now, self.thread))
        self.now += 20

    def copy(self, way: Way, num_bytes: int, *, pageable: bool = False) -> None:
        """An asynchronous copy of its own."""
        call = self.call("cudaMemcpyAsync", 1_000)
        start = max(self.device, self.now)
        self.device = start + COPY
        host = "Pageable" if pageable else "Pinned"
        ends = ("Device", host) if way is Way.TO_HOST else (host, "Device")
        self.activities.append(
            Activity(
                Kind.COPY,
                f"Memcpy {'DtoH' if way is Way.TO_HOST else 'HtoD'} ({ends[0]} -> {ends[1]})",
                start,
                self.device,
                self.process,
                call.correlation,
                way=way,
                num_bytes=num_bytes,
                pageable=pageable,
            )
        )

    def call(self, name: str, ns: int) -> Call:
        self.correlation += 1
        made = Call(name, self.now, self.now + ns, self.process, self.thread, self.correlation)
        self.calls.append(made)
        self.now += ns
        return made

    def profile(self) -> Profile:
        parts = (self.ranges, self.counts, self.calls, self.activities, self.runs, self.creations)
        return Profile("a test", *parts)

    def _run(self, node: Node, number: int, launch: Call, start: int) -> int:
        made = Activity(
            node.kind, node.name, start, start + node.ns, self.process, launch.correlation, number
        )
        self.activities.append(replace(made, way=node.way))
        return start + node.ns


LAUNCH_CALLS = {
    Kind.KERNEL: "cudaLaunchKernel",
    Kind.SET: "cudaMemsetAsync",
    Kind.COPY: "cudaMemcpyAsync",
}


def served(
    *,
    replays: int = 6,
    layers: int = 2,
    process: int = 1234,
    pauses: Mapping[int, int] | None = None,
    at_end: bool = False,
    recorder: Recorder | None = None,
) -> Recorder:
    """An engine that captures decode-8 and decode-1 and then decodes; before replay i the host does
    nothing for `pauses[i]`, counted from the moment when the device has nothing left to do."""
    recorder = recorder or Recorder(process, process << 24 | 7)
    step = step_nodes(layers)
    large = recorder.capture("decode-8", step, at_end=at_end)
    small = recorder.capture("decode-1", step, at_end=at_end)
    for i in range(replays):
        if pauses and i in pauses:
            recorder.now = max(recorder.now, recorder.device) + pauses[i]
        elif i > 1:
            recorder.wait()
        last = i == replays - 1
        recorder.replay(
            "decode-1" if last else "decode-8", step, small if last else large, rows=max(1, 8 - i)
        )
    return recorder


def by_stage(replays: int, layers: int = 2) -> dict[str, int]:
    """What `served` spends in each stage."""
    sums: dict[str, int] = {}
    for node in step_nodes(layers):
        sums[node.path[0]] = sums.get(node.path[0], 0) + replays * node.ns
    return sums


def as_graph_level(profile: Profile) -> Profile:
    """The same, recorded with one entry per launch."""
    runs = []
    for launch in (x for x in profile.calls if x.name == "cudaGraphLaunch"):
        ran = [x for x in profile.activities if x.correlation == launch.correlation]
        run = GraphRun(ran[0].start, ran[-1].end, launch.process, launch.correlation, 5)
        runs.append(run)
    return replace(
        profile,
        activities=[x for x in profile.activities if x.node is None],
        runs=runs,
        creations=[],
    )


def nodes_in(profile: Profile) -> Iterator[Activity]:
    """The activities of graphs."""
    return (x for x in profile.activities if x.node is not None)
