"""Engine.verify finds what it is for, and nothing in a sound engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from graphattn import ConfigError
from graphattn.engine import Engine
from tests.runtime.serving import make_engine
from tests.runtime.tiny_model import TinyModel


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine(TinyModel(softcap=2.0, sinks=True))


def test_a_sound_engine_verifies_and_serves_on(engine: Engine) -> None:
    report = engine.verify(60, seed=1)
    assert report.ok, str(report)
    assert report.steps == 60
    model = TinyModel(softcap=2.0, sinks=True)
    (done,) = engine.generate([[1, 2, 3]], max_new_tokens=9)
    assert list(done.token_ids) == model.generate([1, 2, 3], 9)


def test_an_engine_audits_clean(engine: Engine) -> None:
    report = engine.audit()
    assert report.findings == ()
    assert report.num_ops > 20


def _skip(engine: Engine, what: str) -> Callable[[], None]:
    """A program with one piece of the step left out."""
    memory = engine._runner.memory

    def program() -> None:
        saved = {n: t.clone() for n, t in memory.tensors().items() if what in n}
        pools = {n: p.clone() for n, p in engine._runner.pools().items() if what in n}
        engine._runner.programs[engine.config.buckets.mixed[-1]]()
        for name, tensor in (memory.tensors() | engine._runner.pools()).items():
            if what in name:
                tensor.copy_((saved | pools)[name])

    return program


@pytest.mark.parametrize(
    "forgotten",
    [
        "step.kv_slot",
        "step.visible_end",
        "step.query_start",
        "state.context_len",
        "output",
        "keys.0",
    ],
)
def test_a_replay_that_forgets_something_is_caught(forgotten: str) -> None:
    engine = make_engine(TinyModel(), max_tokens=16)
    for bucket in engine.config.buckets.mixed:
        engine._runner.graphs[bucket].replay = _skip(engine, forgotten)  # type: ignore[method-assign]
    report = engine.verify(20)
    assert not report.ok
    assert report.difference is not None


def test_verify_needs_an_idle_engine_without_prepacking() -> None:
    packed = make_engine(TinyModel(), prepack=True)
    with pytest.raises(ConfigError, match="without prepacked linears"):
        packed.verify(1)
    with make_engine(TinyModel()) as engine:
        engine.submit([1], max_new_tokens=3)
        with pytest.raises(ConfigError, match="verify: wanted an idle engine"):
            engine.verify(1)


def test_verify_leaves_random_numbers_and_slots_alone(engine: Engine) -> None:
    before = {n: t.clone() for n, t in engine._runner.memory.state.tensors().items()}
    engine.verify(5)
    for name, tensor in engine._runner.memory.state.tensors().items():
        assert torch.equal(tensor, before[name]), name
