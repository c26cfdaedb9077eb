"""What a replay must share with the eager step, and what it must not rely on."""

from __future__ import annotations

import gc
import resource

import pytest
import torch

from graphattn.draft import NGram, Speculation
from graphattn.draft_model import DraftModel
from graphattn.engine import Engine
from graphattn.graphs import capture_graphs
from tests.runtime.serving import make_engine, prompts, serve
from tests.runtime.tiny_model import TinyModel

HUGE = 2**30


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes: NaN equals the same NaN."""
    return tensor.contiguous().view(torch.uint8)


def everything(engine: Engine) -> dict[str, torch.Tensor]:
    memory = engine._runner.memory
    return memory.tensors() | engine._runner.pools()


def differences(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in a if not torch.equal(bits(a[name]), bits(b[name]))]


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "sinks": True, "windows": (3, 0)}])
def test_replay_equals_the_eager_step_bitwise(options: dict[str, object]) -> None:
    """Every buffer, all slot state and all pages, after every step of a churning batch."""
    model = TinyModel(**options)
    replayed, eager = (make_engine(model, backend=b) for b in ("host", "eager"))
    jobs = [(p, 2 + 5 * i % 13) for i, p in enumerate(prompts(9, seed=5, longest=30))]
    for prompt, count in jobs:
        for engine in (replayed, eager):
            engine.submit(prompt, max_new_tokens=count, seed=1)
    steps = 0
    while replayed.busy:
        assert replayed.step() == eager.step()
        assert differences(everything(replayed), everything(eager)) == [], f"after step {steps}"
        steps += 1
    assert steps > 20


def poison(engine: Engine) -> None:
    """Everything that a step is to rewrite, and everything that it is not to read."""
    memory, state = engine._runner.memory, engine._runner.memory.state
    for tensor in memory.scratch().values():
        tensor.fill_(float("nan") if tensor.is_floating_point() else HUGE)
    for slot in range(engine.config.bounds.max_batch):
        state.history[slot, int(state.seq_len[slot]) :] = HUGE
        taken = len(engine._scheduler.pages.pages_of(slot))
        state.page_table[slot, taken:] = HUGE


def poison_free_pages(engine: Engine) -> None:
    held = {p for slot in range(4) for p in engine._scheduler.pages.pages_of(slot)}
    free = [p for p in range(engine.config.bounds.num_pages) if p not in held]
    for pool in engine._runner.pools().values():
        pool[free] = float("nan")


@pytest.mark.parametrize("backend", ["host", "eager"])
@pytest.mark.parametrize(
    "drafter", [None, NGram(2), DraftModel(TinyModel(seed=3), 3)], ids=lambda d: type(d).__name__
)
def test_nothing_relies_on_what_an_earlier_step_left(
    backend: str, drafter: Speculation | None
) -> None:
    """Batches grow, shrink and cross bucket sizes while all stale memory is NaN and huge ids."""
    model = TinyModel(windows=(5, 0))
    engine = make_engine(model, backend=backend, num_pages=96, speculate=drafter)
    # pages are taken in launch order, so an admitted slot's table is set in the step itself
    jobs = [(p, 1 + 5 * i % 19) for i, p in enumerate(prompts(12, seed=6))]

    def after_step() -> None:
        engine.poll()
        poison(engine)
        poison_free_pages(engine)

    requests = [engine.submit(p, max_new_tokens=n) for p, n in jobs]
    while engine.busy:
        engine.step()
        after_step()
    for request, (prompt, count) in zip(requests, jobs, strict=True):
        assert request.token_ids == model.generate(prompt, count)


def test_eight_live_rows_then_five_with_a_poisoned_tail() -> None:
    model = TinyModel(windows=(0,))
    with make_engine(model, max_batch=8) as engine:
        short = [engine.submit([i], max_new_tokens=3) for i in range(3)]
        long = [engine.submit([i, 7], max_new_tokens=12) for i in range(5)]
        while engine.busy:
            engine.step()
            engine.poll()
            poison(engine)
        for request in (*short, *long):
            assert request.token_ids == model.generate(
                list(request.prompt), request.params.max_new_tokens
            )


def test_idle_rows_write_nothing() -> None:
    """A padding row mapped to slot 0, or a -1 taken for the last entry, corrupts somebody."""
    model = TinyModel()
    with make_engine(model) as engine:
        request = engine.submit([1, 2, 3], max_new_tokens=20)
        while len(request.token_ids) < 5:
            engine.step()
            engine.poll()
        engine._runner.memory.inputs.slot_of_row.fill_(-1)
        engine._runner.memory.inputs.query_len.fill_(0)
        engine._runner.memory.inputs.admit_generation.fill_(-1)
        engine._runner.memory.inputs.release.fill_(0)
        engine._runner.memory.inputs.page_updates.fill_(-1)
        before = {n: t.clone() for n, t in _lasting(engine).items()}
        for graph in engine._runner.graphs.values():
            graph.replay()
        assert differences(before, _lasting(engine)) == []


def _lasting(engine: Engine) -> dict[str, torch.Tensor]:
    return engine._runner.memory.state.tensors() | engine._runner.pools()


def test_capture_leaves_state_pages_and_random_numbers_as_they_were() -> None:
    """Captured a second time in the middle of serving: warm-up must not advance anything."""
    model = TinyModel()
    with make_engine(model) as engine:
        requests = [engine.submit(p, max_new_tokens=25) for p in prompts(4, seed=7, longest=20)]
        for _ in range(6):
            engine.step()
            engine.poll()
        inputs = engine._runner.memory.inputs
        inputs.slot_of_row.fill_(-1)
        for field in (inputs.query_len, inputs.release):
            field.fill_(0)
        inputs.admit_generation.fill_(-1)
        inputs.page_updates.fill_(-1)
        before = {n: t.clone() for n, t in _lasting(engine).items()}
        torch.manual_seed(11)
        random_state = torch.get_rng_state()
        runner = engine._runner
        parts = (runner.programs, engine.config, runner.stream, runner.weights)
        again = capture_graphs(*parts, runner.pools().values(), None)
        assert torch.equal(torch.get_rng_state(), random_state)
        assert differences(before, _lasting(engine)) == []
        assert gc.isenabled()
        engine._runner.graphs = again
        while engine.busy:
            engine.step()
        for request in requests:
            assert request.token_ids == model.generate(list(request.prompt), 25)


def test_addresses_and_memory_stay_constant_over_a_thousand_steps() -> None:
    model = TinyModel(windows=(0,))
    with make_engine(model, max_batch=2, max_tokens=8) as engine:
        texts = prompts(2, seed=8, longest=4)
        engine.generate(texts, max_new_tokens=40)
        addresses = {name: t.data_ptr() for name, t in everything(engine).items()}
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        expected = engine.generate(texts, max_new_tokens=85)
        first = engine.stats().steps
        while engine.stats().steps < first + 1000:
            assert engine.generate(texts, max_new_tokens=85) == expected
        assert {name: t.data_ptr() for name, t in everything(engine).items()} == addresses
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident
        assert grown < 8 << 10, f"resident memory grew by {grown} KiB"


def test_buckets_replayed_in_turn_do_not_disturb_each_other() -> None:
    """Buckets share memory; elsewhere it was fine with four graphs and garbled with eight."""
    model = TinyModel()
    jobs = [(p, 9 + 4 * i % 31) for i, p in enumerate(prompts(20, seed=9))]
    with make_engine(model, max_batch=8, max_tokens=32, buckets=list(range(1, 9))) as engine:
        for request, (prompt, count) in zip(serve(engine, jobs, seed=3), jobs, strict=True):
            assert request.token_ids == model.generate(prompt, count)
        assert sum(b.replays > 0 for b in engine.report().buckets) >= 7


def test_weights_updated_in_place_are_seen_by_the_next_replay() -> None:
    model, other = TinyModel(), TinyModel(seed=1)
    with make_engine(model) as engine:
        (before,) = engine.generate([[1, 2, 3]], max_new_tokens=10)
        with torch.no_grad():
            for mine, new in zip(model.parameters(), other.parameters(), strict=True):
                mine.copy_(new)
        (after,) = engine.generate([[1, 2, 3]], max_new_tokens=10)
        assert list(after.token_ids) == other.generate([1, 2, 3], 10)
        assert after.token_ids != before.token_ids
