"""One rank of a process-group test: `torchrun ... dcp_worker SCENARIO...`, verdicts on stdout."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.distributed_c10d import _get_default_store

import graphattn
from graphattn.engine import Engine
from graphattn.groups import ProcessGroup
from graphattn.models.contract import ModelStep
from tests.runtime.serving import make_engine, prompts
from tests.runtime.tiny_model import TinyModel
from tests.runtime.tiny_mtp import KnowingMTP, TinyTarget

TIMEOUT = 5.0
JOBS = [(p, 2 + 3 * i % 9) for i, p in enumerate(prompts(6, seed=21, longest=30))]


def run_engine(model: TinyModel, dcp: graphattn.DCP, **options: object) -> list[list[int]] | None:
    """Rank 0 serves `JOBS`, the others follow."""
    with make_engine(model, dcp=dcp, **options) as engine:
        if dist.get_rank():
            engine.follow()
            return None
        requests = [engine.submit(p, max_new_tokens=n) for p, n in JOBS]
        while engine.busy:
            engine.step()
        return [r.token_ids for r in requests]


def parity() -> None:
    """Tokens equal recomputation for every layout, reduction and backend."""
    model = TinyModel(softcap=2.0, sinks=True, windows=(5, 0))
    expected = [model.generate(p, n) for p, n in JOBS]
    for interleave, reduce, backend, page_size in (
        (1, "ag_rs", "host", 4),
        (1, "a2a", "eager", 16),
        (3, "a2a", "host", 4),
        (16, "ag_rs", "host", 16),
    ):
        dcp = graphattn.DCP(dist.group.WORLD, interleave, reduce, timeout=60.0)
        tokens = run_engine(model, dcp, backend=backend, page_size=page_size)
        if tokens is not None:
            assert tokens == expected, (interleave, reduce, backend)
            print(f"parity: equal {interleave} {reduce} {backend}", flush=True)


class ShardedHeads(TinyModel):
    """Query heads and the columns of the output projection over the ranks; K and V everywhere."""

    def forward(self, step: ModelStep) -> torch.Tensor:
        rank, size = dist.get_rank(), dist.get_world_size()
        heads, _, dim = self.heads
        own = slice(rank * heads // size, (rank + 1) * heads // size)
        columns = slice(own.start * dim, own.stop * dim)
        x = self.embed(step.input_ids) + self.position(step.positions)
        for layer in range(len(self.qkv)):
            q, k, v = self._split(layer, x)
            part = step.attend(layer, q[:, own], k, v).flatten(1)
            share = part @ self.out[layer].weight[:, columns].T
            self.group.all_reduce([share])
            x = x + share + self.out[layer].bias
        return self.head(F.layer_norm(x[step.logits_token], x.shape[-1:]))


def sharded() -> None:
    """Query heads sharded over the group: gather Q, combine, scatter."""
    options = {"num_q_heads": 4, "sinks": True, "windows": (0, 5)}
    whole, model = TinyModel(**options), ShardedHeads(**options)
    model.group = ProcessGroup(dist.group.WORLD, timeout=60.0)
    expected = [whole.generate(p, n) for p, n in JOBS]
    for reduce, backend in (("ag_rs", "host"), ("a2a", "host"), ("a2a", "eager")):
        dcp = graphattn.DCP(dist.group.WORLD, 3, reduce, timeout=60.0)
        tokens = run_engine(model, dcp, backend=backend)
        if tokens is not None:
            assert tokens == expected, (reduce, backend)
            print(f"sharded: equal {reduce} {backend}", flush=True)


def drafts() -> None:
    """Greedy and sampled requests with drafts: the tokens of one rank without drafts."""
    model, small = TinyTarget(), TinyModel(num_q_heads=4, head_dim=4, seed=5)
    params = [
        graphattn.SamplingParams(n, seed=i, temperature=0.8 * (i % 2))
        for i, (_, n) in enumerate(JOBS)
    ]

    def submit(engine: Engine) -> list[graphattn.Request]:
        requests = [engine.submit(p, q) for (p, _), q in zip(JOBS, params, strict=True)]
        while engine.busy:
            engine.step()
        return requests

    with make_engine(model) as alone:
        expected = [r.token_ids for r in submit(alone)]
    for interleave, speculate in (
        (1, graphattn.NGram(3)),
        (16, graphattn.DraftModel(small, 2)),
        (2, graphattn.MTP(3, KnowingMTP(model, depth=2, fails=True))),
    ):
        dcp = graphattn.DCP(dist.group.WORLD, interleave, timeout=60.0)
        with make_engine(model, dcp=dcp, speculate=speculate, max_tokens=24) as engine:
            if dist.get_rank():
                engine.follow()
                continue
            assert [r.token_ids for r in submit(engine)] == expected, speculate
            print(f"drafts: equal {type(speculate).__name__}", flush=True)


def own_loop() -> None:
    """StepBuffers of two rows, captured, in a greedy loop that every rank runs by itself."""
    model = TinyModel(softcap=2.0, sinks=True, windows=(5, 0))
    dcp = graphattn.DCP(dist.group.WORLD, interleave=3)
    bounds = graphattn.Bounds(2, 64, 32, page_size=4, num_pages=32, dcp_size=dcp.size, interleave=3)
    buffers = graphattn.StepBuffers.allocate(
        bounds, model.attention_layers, dtype=torch.float32, device="cpu", dcp=dcp
    )
    buffers.page_table.copy_(torch.arange(2 * bounds.pages_per_seq).view(2, -1))
    ids, lengths = torch.zeros(32, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int32)

    def step() -> torch.Tensor:
        buffers.prepare_lengths(lengths[0], lengths[1])
        buffers.input_ids.copy_(ids)
        return model(buffers).argmax(-1)

    with graphattn.Graph(step, device="cpu") as graph:
        for pair in (JOBS[:2], JOBS[2:4]):
            tokens, cached = [list(p) for p, _ in pair], [0, 0]
            for _ in range(6):
                new = [t[c:][:16] for t, c in zip(tokens, cached, strict=True)]
                flat = new[0] + new[1]
                ids[: len(flat)] = torch.tensor(flat)
                lengths.copy_(torch.tensor([[*map(len, new)], cached]))
                graph.replay()
                for row, token in enumerate(graph.outputs[:2].tolist()):
                    cached[row] += len(new[row])
                    if cached[row] == len(tokens[row]):
                        tokens[row].append(token)
            for (prompt, _), got in zip(pair, tokens, strict=True):
                count = len(got) - len(prompt)
                assert count >= 4
                assert got[len(prompt) :] == model.generate(prompt, count)
    buffers.close()
    print("own_loop: equal", flush=True)


def late() -> None:
    """One rank enters capture seconds after the others."""
    if dist.get_rank() == 1:
        time.sleep(2.0)
    model = TinyModel(windows=(0,))
    tokens = run_engine(model, graphattn.DCP(dist.group.WORLD, timeout=60.0))
    if tokens is not None:
        assert tokens == [model.generate(p, n) for p, n in JOBS]
        print("late: equal", flush=True)


def disagree() -> None:
    """Ranks that were captured differently say in what."""
    try:
        make_engine(
            TinyModel(),
            dcp=graphattn.DCP(dist.group.WORLD, timeout=TIMEOUT),
            max_tokens=16 + 16 * dist.get_rank(),
        )
    except graphattn.ConfigError as error:
        print(f"rank {dist.get_rank()}: {error}", flush=True)


def dead() -> None:
    """A rank dies between two steps; the others end with an error that says so."""
    lose(lambda: os._exit(0))


def stalled() -> None:
    """A rank stands still between two steps, alive as far as the kernel knows."""
    lose(lambda: os.kill(os.getpid(), signal.SIGSTOP))


def lose(leave: Callable[[], None]) -> None:
    """The last rank leaves at step 3 and the others notice; one that stands still is woken then."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pids = torch.zeros(size, dtype=torch.int64)
    pids[rank] = os.getpid()
    dist.all_reduce(pids)
    store = _get_default_store()
    engine = make_engine(TinyModel(), dcp=graphattn.DCP(dist.group.WORLD, timeout=TIMEOUT))
    launch = engine._runner.launch

    def leaving(*args: object) -> None:
        if rank == size - 1 and engine.stats().steps == 3:
            leave()
        launch(*args)  # type: ignore[arg-type]

    engine._runner.launch = leaving  # type: ignore[method-assign]
    started = time.monotonic()
    try:
        if rank:
            engine.follow()
        request = engine.submit([1, 2, 3], max_new_tokens=50)
        while engine.busy:
            engine.step()
    except graphattn.StepError as error:
        waited = time.monotonic() - started
        if rank < size - 1:
            assert waited < 12 * TIMEOUT, waited
            os.write(1, f"rank {rank}: {error}\n".encode())  # whole, between those of others
            store.set(f"noticed/{rank}", "")
        if rank == 0:
            assert request.finish_reason is graphattn.FinishReason.ERROR
            store.wait([f"noticed/{r}" for r in range(size - 1)])  # before it shows life again
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pids[-1]), signal.SIGCONT)
    os._exit(0)  # the group is broken: its teardown would wait for the lost rank


SCENARIOS = (parity, sharded, drafts, own_loop, late, disagree, dead, stalled)

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name in sys.argv[1:]:
        {f.__name__: f for f in SCENARIOS}[name]()
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()
