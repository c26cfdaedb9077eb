"""The engine on a GPU: `pytest -m gpu`. Not yet run on one.

Tokens against recomputation on the same device, replay against eager bitwise, and what must not
happen in the loop: synchronisation, allocation, a moved address.
"""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

import graphattn
from graphattn import DCP, VirtualGroup
from tests.runtime.serving import make_engine, prompts, serve
from tests.runtime.tiny_model import TinyModel

pytestmark = pytest.mark.gpu

JOBS = [(p, 3 + 5 * i % 23) for i, p in enumerate(prompts(12, seed=51))]
CUDA = torch.device("cuda")


def on_gpu(**options: object) -> TinyModel:
    return TinyModel(head_dim=64, hidden=48, **options).to(CUDA)  # type: ignore[arg-type]


def capture(model: TinyModel, **options: object) -> graphattn.Engine:
    small = {"max_batch": 4, "max_tokens": 32, "page_size": 16, "num_pages": 64}
    return graphattn.capture(model, **(small | options))  # type: ignore[arg-type]


@contextmanager
def synchronisation_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", ["cuda", "eager"])
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 2.0, "sinks": True, "windows": (3, 0)}, {"windows": (5, 0, 9)}]
)
def test_tokens_equal_recomputation(backend: str, options: dict[str, object]) -> None:
    model = on_gpu(**options)
    with capture(model, backend=backend) as engine:
        for request, (prompt, count) in zip(serve(engine, JOBS), JOBS, strict=True):
            assert request.token_ids == model.generate(prompt, count)
        assert engine.stats().fallbacks == 0


def test_replay_equals_eager_bitwise() -> None:
    with capture(on_gpu(softcap=2.0, sinks=True)) as engine:
        report = engine.verify(200)
        assert report.ok, str(report)


@pytest.mark.parametrize("reduce", ["ag_rs", "a2a"])
@pytest.mark.parametrize(("W", "I"), [(2, 1), (4, 16), (8, 3)])
def test_virtual_ranks(W: int, I: int, reduce: str) -> None:
    model = on_gpu(sinks=True)
    dcp = DCP(VirtualGroup(W), I, reduce)  # type: ignore[arg-type]
    with capture(model, dcp=dcp) as engine:
        assert engine.verify(50).ok
        for request, (prompt, count) in zip(serve(engine, JOBS), JOBS, strict=True):
            assert request.token_ids == model.generate(prompt, count)


def test_nccl_group_of_one(unused_tcp_port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_tcp_port)}
    dist.init_process_group("nccl", rank=0, world_size=1)
    try:
        model = on_gpu()
        for reduce in ("ag_rs", "a2a"):
            with capture(model, dcp=DCP(dist.group.WORLD, 1, reduce)) as engine:
                (done,) = engine.generate([[1, 2, 3]], max_new_tokens=12)
                assert list(done.token_ids) == model.generate([1, 2, 3], 12)
    finally:
        dist.destroy_process_group()


@pytest.fixture
def unused_tcp_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_loop_never_synchronises_nor_allocates() -> None:
    model = on_gpu()
    with capture(model) as engine:
        engine.generate([[1, 2, 3]] * 4, max_new_tokens=8)
        requests = [engine.submit([i + 1] * 5, max_new_tokens=60) for i in range(4)]
        addresses = {n: t.data_ptr() for n, t in engine._runner.memory.tensors().items()}
        before = torch.cuda.memory_stats(CUDA)
        with synchronisation_is_an_error():
            while engine.busy:
                engine.step()
                engine.poll()
        after = torch.cuda.memory_stats(CUDA)
        for counter in ("allocation.all.allocated", "segment.all.allocated"):
            assert after[counter] == before[counter], counter
        assert {n: t.data_ptr() for n, t in engine._runner.memory.tensors().items()} == addresses
        for request in requests:
            assert request.token_ids == model.generate(list(request.prompt), 60)


WAITS = ("Synchronize", "cudaMemcpy", "cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaMallocHost")


def test_a_trace_of_a_hundred_steps_has_two_copies_each_and_no_synchronising_call() -> None:
    with capture(on_gpu(max_seq_len=256)) as engine:
        engine.generate([[1, 2, 3]] * 4, max_new_tokens=8)
        for i in range(4):
            engine.submit([i + 1] * 5, max_new_tokens=120, ignore_eos=True)
        while engine.stats().running < 4:
            engine.step()
            engine.poll()
        first = engine.stats().steps
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as trace:
            with torch.profiler.record_function("loop"):
                while engine.stats().steps < first + 100:
                    engine.step()
                    engine.poll()
            torch.cuda.synchronize()  # the last copies land in the trace
        events = list(trace.events())
    (loop,) = [e.time_range for e in events if e.name == "loop" and e.device_type.name == "CPU"]
    calls = [e.name for e in events if loop.start <= e.time_range.start <= loop.end]
    assert "cudaGraphLaunch" in calls
    waits = [name for name in calls if any(w in name for w in WAITS) and "Async" not in name]
    assert waits == []
    copies = Counter(e.name.split(" (")[0] for e in events if e.name.startswith("Memcpy"))
    assert copies["Memcpy HtoD"] == copies["Memcpy DtoH"] == 100


def test_capture_survives_a_busy_thread_and_leaves_no_trace() -> None:
    model, stop = on_gpu(), threading.Event()

    def copy() -> None:
        source = torch.ones(1 << 16).pin_memory()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while not stop.is_set():
                source.to(CUDA, non_blocking=True)
                stream.synchronize()

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        random_state = torch.cuda.get_rng_state()
        with capture(model) as engine:
            assert torch.equal(torch.cuda.get_rng_state(), random_state)
            assert gc.isenabled()
            (done,) = engine.generate([[1, 2, 3]], max_new_tokens=12)
    finally:
        stop.set()
        thread.join()
    assert list(done.token_ids) == model.generate([1, 2, 3], 12)


def test_pages_are_sized_from_a_measured_step() -> None:
    model = on_gpu(max_seq_len=4096)
    with graphattn.capture(model, max_batch=4) as engine:
        report = engine.report()
        free, total = torch.cuda.mem_get_info(CUDA)
        assert report.kv_bytes < total
        assert free > 0
        assert report.num_pages >= engine.config.bounds.pages_per_seq
        for bucket in report.buckets:
            assert bucket.host_nodes == 0
            assert not any("host" in way for way in bucket.copies)
            assert sum(bucket.operations.values()) == bucket.nodes
        fixed = {part for part in report.measured.sizes() if part != "graphs"}
        assert all(report.predicted.sizes()[n] == report.measured.sizes()[n] for n in fixed)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs; never run so far")
def test_two_gpus_share_a_cache() -> None:
    import subprocess
    import sys
    from pathlib import Path

    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", "examples/dcp.py"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]


def test_launch_options_reach_make_engine() -> None:
    """The helper of the CPU tests works with a CUDA stream too."""
    from graphattn.stream import CudaStream

    model = on_gpu()
    with make_engine(model, stream=CudaStream(CUDA), backend="cuda") as engine:
        (done,) = engine.generate([[4, 5]], max_new_tokens=9)
        assert list(done.token_ids) == model.generate([4, 5], 9)


def test_weights_that_change() -> None:
    """Replay reads them at their addresses; other addresses are refused until captured anew."""
    model, other = on_gpu(), on_gpu(seed=1)
    with capture(model, backend="cuda") as engine:
        model.load_state_dict(other.state_dict())
        (done,) = engine.generate([[3, 1, 4]], max_new_tokens=8)
        assert list(done.token_ids) == other.generate([3, 1, 4], 8)
        model.load_state_dict(on_gpu().state_dict(), assign=True)
        request = engine.submit([3, 1, 4], max_new_tokens=8)
        with pytest.raises(graphattn.WeightsMovedError):
            engine.step()
        engine.recapture()
        while engine.busy:
            engine.step()
            engine.poll(timeout=1)
        assert request.token_ids == model.generate([3, 1, 4], 8)
