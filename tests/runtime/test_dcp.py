"""Decode Context Parallelism in one process: any interleave, any reduction, any step."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from graphattn import DCP, ConfigError, VirtualGroup
from graphattn.bounds import local_length
from graphattn.engine import Engine
from tests.runtime.lagging_stream import LaggingStream
from tests.runtime.serving import make_engine, prompts, serve
from tests.runtime.tiny_model import TinyModel

JOBS = [(p, 1 + 5 * i % 17) for i, p in enumerate(prompts(8, seed=31, longest=45))]
LAYOUTS = [(2, 1), (2, 2), (2, 3), (4, 1), (4, 16), (3, 5), (2, 64)]


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel(softcap=2.0, sinks=True, windows=(5, 0))


@pytest.fixture(scope="module")
def expected(model: TinyModel) -> list[list[int]]:
    return [model.generate(p, n) for p, n in JOBS]


def virtual(W: int, I: int, reduce: str = "ag_rs") -> DCP:
    return DCP(VirtualGroup(W), I, reduce)  # type: ignore[arg-type]


@pytest.mark.parametrize("reduce", ["ag_rs", "a2a"])
@pytest.mark.parametrize(("W", "I"), LAYOUTS)
def test_tokens_are_those_of_one_rank(
    model: TinyModel, expected: list[list[int]], W: int, I: int, reduce: str
) -> None:
    """Chunks end inside interleave blocks, rows are shorter than a block, shards are empty."""
    backend = "eager" if I == 2 else "host"
    with make_engine(model, dcp=virtual(W, I, reduce), backend=backend) as engine:
        assert [r.token_ids for r in serve(engine, JOBS)] == expected
        assert engine.stats().fallbacks == 0


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_the_page_size_need_not_fit_the_interleave(
    model: TinyModel, expected: list[list[int]], page_size: int
) -> None:
    with make_engine(model, dcp=virtual(2, 3), page_size=page_size) as engine:
        assert [r.token_ids for r in serve(engine, JOBS)] == expected


def test_replay_verifies_and_audits_clean(model: TinyModel) -> None:
    for reduce in ("ag_rs", "a2a"):
        with make_engine(model, dcp=virtual(2, 3, reduce)) as engine:
            report = engine.verify(30)
            assert report.ok, str(report)
            assert engine.audit().findings == ()


def test_steps_that_run_late_change_nothing(model: TinyModel, expected: list[list[int]]) -> None:
    stream = LaggingStream(pace=2)
    with make_engine(model, dcp=virtual(4, 2), stream=stream, run_ahead=3) as engine:
        assert [r.token_ids for r in serve(engine, JOBS)] == expected


def test_short_sequences_leave_ranks_without_keys(model: TinyModel) -> None:
    """(W, I) = (4, 64): three of four shards stay empty, and no rank skips a collective."""
    with make_engine(model, dcp=virtual(4, 64)) as engine:
        (done,) = engine.generate([[7, 8]], max_new_tokens=9)
        assert list(done.token_ids) == model.generate([7, 8], 9)
        for shard in engine._runner.memory.target.shards[1:]:
            assert not any(bool(pool.any()) for pool in shard.pools.tensors().values())


def test_each_rank_holds_exactly_its_positions(model: TinyModel) -> None:
    W, I, length = 3, 2, 17
    with make_engine(model, dcp=virtual(W, I), page_size=4) as engine:
        engine.submit(list(range(1, length + 1)), max_new_tokens=4)
        engine.step()
        engine.step()
        for rank, shard in enumerate(engine._runner.memory.target.shards):
            held = int((shard.pools.keys[0] != 0).any(-1).any(1).sum())
            assert held == local_length(length, rank, W, I)


def test_ranks_see_other_lengths_after_other_inputs(model: TinyModel) -> None:
    """The same graph, other contents: visible ranges follow the global length, rank by rank."""
    W, I = 4, 3
    with make_engine(model, dcp=virtual(W, I), max_batch=1) as engine:
        request = engine.submit([5] * 10, max_new_tokens=20)
        seen = []
        while engine.busy:
            engine.step()
            engine.poll()
            if len(request.token_ids) > 1:
                length = 9 + len(request.token_ids)
                ends = [int(s.buffers.visible_end[0]) for s in engine._runner.memory.target.shards]
                assert ends == [local_length(length, r, W, I) for r in range(W)]
                seen.append(ends)
        for before, after in itertools.pairwise(seen):
            grown = [b - a for a, b in zip(before, after, strict=True)]
            assert sorted(grown) == [0, 0, 0, 1], "each token makes exactly one rank grow"


def test_an_idle_engine_launches_the_bucket_it_is_told(model: TinyModel) -> None:
    """Data-parallel ranks that share experts must all replay, the idle ones too."""
    with make_engine(model, dcp=virtual(2, 1)) as engine:
        before = {n: t.clone() for n, t in _lasting(engine).items()}
        for bucket in engine.config.buckets:
            assert engine.step(bucket)
        assert engine.stats().steps == len(list(engine.config.buckets))
        for name, tensor in _lasting(engine).items():
            assert torch.equal(tensor, before[name]), name
        (done,) = engine.generate([[1, 2]], max_new_tokens=5)
        assert list(done.token_ids) == model.generate([1, 2], 5)


def test_a_forced_bucket_carries_what_fits(model: TinyModel) -> None:
    with make_engine(model, dcp=virtual(2, 1)) as engine:
        requests = [engine.submit([i] * 20, max_new_tokens=6) for i in range(1, 5)]
        mixed, decode = engine.config.buckets.mixed[-1], engine.config.buckets.decode
        while engine.busy:
            engine.step(decode[-1] if engine._scheduler.decoding == 4 else mixed)
        for request in requests:
            assert request.token_ids == model.generate(list(request.prompt), 6)
        busy = [engine.submit([i], max_new_tokens=9) for i in range(4)]
        engine.step(mixed)
        with pytest.raises(ConfigError, match="bucket: wanted at least 4 token places"):
            engine.step(decode[0])
        assert all(not r.finished for r in busy)


def _lasting(engine: Engine) -> dict[str, torch.Tensor]:
    return engine._runner.memory.state.tensors() | engine._runner.pools()


def test_capacity_grows_with_the_ranks(model: TinyModel) -> None:
    """The same pages per rank hold W times the tokens."""
    options: dict[str, Any] = {"num_pages": 3, "page_size": 4, "max_batch": 1, "max_tokens": 8}
    for W in (1, 2, 4):
        with make_engine(model, dcp=virtual(W, 1), **options) as engine:
            assert engine.config.bounds.max_seq_len == 12 * W


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None,), "group: wanted a torch.distributed process group or a VirtualGroup"),
        ((VirtualGroup(2), 0), "interleave: wanted an integer >= 1, got 0"),
        ((VirtualGroup(2), 1, "ring"), "reduce: wanted 'ag_rs' or 'a2a', got 'ring'"),
        ((VirtualGroup(2), 1, "a2a", 0), "timeout: wanted seconds > 0, got 0"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DCP(*arguments)


def test_bad_use_is_named(model: TinyModel) -> None:
    with pytest.raises(ConfigError, match="size: wanted an integer >= 1"):
        VirtualGroup(0)
    with pytest.raises(ConfigError, match=r"dcp: wanted graphattn\.DCP"):
        make_engine(model, dcp=VirtualGroup(2))
    with make_engine(model) as engine, pytest.raises(ConfigError, match="follow: wanted"):
        engine.follow()


def test_query_heads_are_all_there_or_evenly_sharded(model: TinyModel) -> None:
    class Half(TinyModel):
        def forward(self, step: Any) -> torch.Tensor:
            class Halved:
                input_ids, positions = step.input_ids, step.positions
                logits_token = step.logits_token

                @staticmethod
                def attend(layer: int, q: torch.Tensor, *kv: torch.Tensor) -> torch.Tensor:
                    return step.attend(layer, q[:, :4], *kv)

            return super().forward(Halved())  # type: ignore[arg-type]

    with pytest.raises(Exception, match="q: wanted 6 or 3 query heads on each of 2 ranks, got 4"):
        make_engine(Half(), dcp=virtual(2, 1))
