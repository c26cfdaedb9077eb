"""What slows a loop down is found and said in words; what belongs to a loop is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from graphattn.profiling.events import Activity, Kind, Profile, Way
from graphattn.profiling.report import ProfileReport, report_of
from tests.profiling.recording import Node, Recorder, served, step_nodes


def goes_on(recorder: Recorder) -> Recorder:
    """Three more steps behind what a test planted."""
    step = step_nodes()
    clones = [node + 100_000 for node in range(1, len(step) + 1)]
    for _ in range(3):
        recorder.wait()
        recorder.replay("decode-8", step, clones)
    return recorder


def planted(plant: Callable[[Recorder], object]) -> ProfileReport:
    recorder = served()
    plant(recorder)
    return report_of(goes_on(recorder).profile())


def the_only(report: ProfileReport, kind: str) -> str:
    assert [finding.kind for finding in report.findings] == [kind]
    return report.findings[0].text


def test_a_loop_as_it_should_be_has_no_findings() -> None:
    report = report_of(goes_on(served()).profile())
    assert report.ok
    assert str(report).endswith("nothing found that slows the loop down")


def test_a_host_gap_says_where_and_what_the_host_did() -> None:
    def pause(recorder: Recorder) -> None:
        recorder.now = recorder.device + 400_000
        recorder.call("cudaMemGetInfo", 100_000)
        recorder.now += 500_000

    text = the_only(planted(pause), "host gap")
    assert "the GPU was idle between replays for 1.01 ms" in text
    assert "in 1 of 8 gaps" in text
    assert "between replays 5 (decode-1) and 6 (decode-8)" in text
    assert "launched 1.00 ms after the GPU had ended" in text
    assert "having spent 902 us outside CUDA calls, 100 us cudaMemGetInfo" in text


def test_short_gaps_are_none() -> None:
    report = report_of(served(pauses={2: 1_000, 4: 12_000}).profile())
    assert report.ok
    assert max(gap.late or 0 for gap in report.gaps) > 10_000


def test_a_gap_that_is_little_of_the_loop_is_none() -> None:
    report = report_of(served(replays=60, pauses={30: 30_000}).profile())
    assert report.ok
    assert max(gap.idle for gap in report.gaps) > 30_000


def test_replays_that_overlap_leave_no_gap_before_the_last_has_ended() -> None:
    """Graphs may be launched into several streams."""
    spans = ((0, 100), (10, 50), (120, 130))
    kernels = [Activity(Kind.KERNEL, "a", a, b, 1, i, i) for i, (a, b) in enumerate(spans, 1)]
    report = report_of(Profile("two streams", [], [], [], kernels, [], []))
    assert [gap.idle for gap in report.gaps] == [0, 20]


def test_a_gap_in_which_the_device_copied_was_not_idle() -> None:
    """The host was late, but what it did meanwhile kept the device busy."""
    recorder = served(replays=2)
    end = recorder.device
    recorder.now = end + 300_000
    call = recorder.call("cudaMemcpyAsync", 10)
    copy = Activity(
        Kind.COPY, "Memcpy HtoD (Pinned -> Device)", end, end + 299_000, recorder.process,
        call.correlation, way=Way.TO_DEVICE,
    )  # fmt: skip
    recorder.activities.append(copy)
    report = report_of(goes_on(recorder).profile())
    assert max(gap.idle for gap in report.gaps) < 10_000
    assert max(gap.late or 0 for gap in report.gaps) > 290_000
    assert report.ok


def test_a_device_to_host_copy_is_told_from_the_output_block() -> None:
    text = the_only(
        planted(lambda r: r.within("plan", lambda: r.copy(Way.TO_HOST, 4))), "device-to-host copy"
    )
    assert text.startswith("once in the loop something was copied from device to host, 4 B in all")
    assert "inside plan by cudaMemcpyAsync" in text
    assert ".item()" in text


def test_each_of_many_copies_counts() -> None:
    def plant(recorder: Recorder) -> None:
        for _ in range(5):
            recorder.copy(Way.TO_HOST, 1_000)

    assert the_only(planted(plant), "device-to-host copy").startswith("5 times in the loop")


@pytest.mark.parametrize(
    "name", ["cudaStreamSynchronize", "cudaDeviceSynchronize", "cuEventSynchronize", "cudaMemcpy"]
)
def test_a_call_that_waits_for_the_device_is_named(name: str) -> None:
    text = the_only(planted(lambda r: r.call(name, 9_000)), "synchronising call")
    assert text.startswith(f"{name} was called once in the loop and took 9.00 us")


def test_the_wait_for_results_is_no_finding_elsewhere_it_is() -> None:
    recorder = served()
    assert any(call.name == "cudaEventSynchronize" for call in recorder.calls)
    assert report_of(recorder.profile()).ok
    unnamed = [x for x in recorder.ranges if x.name != "wait"]
    report = report_of(replace(recorder.profile(), ranges=unnamed))
    assert the_only(report, "synchronising call").startswith("cudaEventSynchronize was called 4")


def test_before_and_after_the_loop_anything_is_allowed() -> None:
    recorder = Recorder()
    recorder.call("cudaDeviceSynchronize", 1_000)
    recorder.copy(Way.TO_HOST, 64)
    served(recorder=recorder)
    recorder.now = recorder.device + 10
    recorder.call("cudaDeviceSynchronize", 1_000)
    recorder.copy(Way.TO_HOST, 64, pageable=True)
    recorder.call("cudaFree", 10)
    assert report_of(recorder.profile()).ok


def test_pageable_memory_is_named() -> None:
    text = the_only(planted(lambda r: r.copy(Way.TO_DEVICE, 64, pageable=True)), "pageable copy")
    assert "pinned memory" in text


def test_kernels_outside_graphs_are_counted_by_name() -> None:
    def plant(recorder: Recorder) -> None:
        for name in ("softmax", "softmax", "add"):
            call = recorder.call("cudaLaunchKernel", 5)
            start = recorder.device
            recorder.device += 100
            recorder.activities.append(
                Activity(Kind.KERNEL, name, start, start + 100, 1234, call.correlation)
            )

    text = the_only(planted(plant), "kernel outside graphs")
    assert text.startswith("3 kernels were launched by themselves in the loop, 300 ns in all")
    assert "softmax (2), add (1)" in text


def test_allocations_are_named_but_not_those_of_a_stream() -> None:
    def plant(recorder: Recorder) -> None:
        recorder.call("cudaMallocAsync", 5)
        recorder.call("cudaMalloc", 2_000)
        recorder.call("cudaFree", 3_000)

    text = the_only(planted(plant), "allocation")
    assert text.startswith("memory was allocated or freed 2 times in the loop, 5.00 us in all")


def test_a_copy_inside_a_graph_names_its_stage() -> None:
    recorder = Recorder()
    step = [*step_nodes(), Node(("commit",), "copy", 700, Kind.COPY, Way.TO_HOST)]
    clones = recorder.capture("decode-8", step)
    for _ in range(3):
        recorder.replay("decode-8", step, clones)
    text = the_only(report_of(recorder.profile()), "captured copy")
    assert "which ran 3 times (commit)" in text
