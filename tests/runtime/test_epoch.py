"""Debug mode names what attention reads that the step did not derive."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from graphattn import (
    DCP,
    MTP,
    CaptureError,
    ConfigError,
    DraftModel,
    EngineClosedError,
    NGram,
    StepError,
    VirtualGroup,
)
from graphattn.attention import Attention
from graphattn.engine import Engine
from graphattn.memory import ModelMemory
from graphattn.metadata import StepMetadata
from graphattn.work import AttentionWork
from tests.runtime.serving import make_engine
from tests.runtime.tiny_model import TinyModel
from tests.runtime.tiny_mtp import KnowingMTP, TinyTarget

SMALL: dict[str, Any] = {"max_batch": 2, "buckets": [2]}
DERIVED = [
    *("query_start", "visible_start", "visible_end"),
    *("row_begin", "row_end", "row_chunk", "row_splits"),
    *("decode_items", "decode_count", "prefill_items", "prefill_count"),
]


def serve(engine: Engine) -> list[tuple[int, ...]]:
    """Both kinds of steps, with padding."""
    done = engine.generate([[1, 2, 3, 1, 2], [4, 5]], max_new_tokens=6)
    return [each.token_ids for each in done]


@pytest.mark.parametrize("speculate", [None, NGram(2)], ids=["plain", "drafts"])
def test_no_token_changes(speculate: NGram | None) -> None:
    with make_engine(TinyModel(), speculate=speculate, **SMALL) as engine:
        expected, nodes = serve(engine), engine.report().buckets[0].nodes
    with make_engine(TinyModel(), speculate=speculate, debug=True, **SMALL) as engine:
        assert serve(engine) == expected
        assert engine.report().buckets[0].nodes > nodes


@pytest.mark.parametrize("name", DERIVED)
def test_each_tensor_is_checked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second layer reads one that holds what it should, in memory that nobody derives."""
    real = Attention.work

    def work(self: Attention, layer: int, step: StepMetadata, *, mixed: bool) -> AttentionWork:
        own = real(self, layer, step, mixed=mixed)
        given = getattr(own, name)
        return replace(own, **{name: given.clone()}) if layer and given is not None else own

    monkeypatch.setattr(Attention, "work", work)
    with make_engine(TinyModel(windows=(0, 0)), **SMALL) as engine:
        serve(engine)  # nothing notices it
    with pytest.raises(CaptureError, match=f"attention of layer 1 reads {name} that"):
        make_engine(TinyModel(windows=(0, 0)), debug=True, **SMALL)


def test_a_replay_checks_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was fresh at capture goes stale in a replay: the engine ends, and says why."""
    real, moves_on = Attention.work, torch.zeros(1, dtype=torch.int32)

    def work(self: Attention, *args: Any, **options: Any) -> AttentionWork:
        assert self.epoch.counter is not None
        self.epoch.counter.add_(moves_on)
        return real(self, *args, **options)

    monkeypatch.setattr(Attention, "work", work)
    engine = make_engine(TinyModel(), debug=True, **SMALL)
    serve(engine)
    request = engine.submit([1, 2, 3], max_new_tokens=4)
    moves_on.fill_(1)
    with pytest.raises(StepError, match="attention of layer 0 reads kv_slot that"):
        engine.step()
    assert request.finished
    assert "attention of layer 0 reads kv_slot" in str(request.error)
    with pytest.raises(EngineClosedError):
        engine.submit([1])


def drafters() -> dict[str, tuple[Any, dict[str, Any]]]:
    target = TinyTarget()
    return {
        "draft model": (TinyModel(), {"speculate": DraftModel(TinyModel(windows=(4,)), 2)}),
        "module": (target, {"speculate": MTP(3, KnowingMTP(target))}),
    }


@pytest.mark.parametrize("kind", drafters())
def test_a_pass_that_keeps_the_metadata_of_the_last_is_named(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter derives for its first pass, and once more for all passes of one place."""
    real, single = ModelMemory.prepare, [0]

    def prepare(self: ModelMemory, steps: Any, rows: Any) -> None:
        ones = rows.prompt_len.data_ptr() == rows.draft_count.data_ptr()  # as single_rows has them
        single[0] = single[0] + 1 if ones else 0
        if single[0] < 2:
            real(self, steps, rows)

    model, options = drafters()[kind]
    monkeypatch.setattr(ModelMemory, "prepare", prepare)
    with pytest.raises(CaptureError, match="reads kv_slot that this step did not derive"):
        make_engine(model, debug=True, **SMALL, **options)


def test_a_rank_that_is_left_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(self: ModelMemory, steps: Any, rows: Any) -> None:
        steps[0].prepare(rows, self.shards[0].bounds, self.shape)
        self.attention.epoch.stamp(steps[0])

    monkeypatch.setattr(ModelMemory, "prepare", prepare)
    with pytest.raises(CaptureError, match="attention of layer 0 reads kv_slot that"):
        make_engine(TinyModel(), dcp=DCP(VirtualGroup(2), 3), debug=True, **SMALL)


def test_debug_is_a_bool() -> None:
    with pytest.raises(ConfigError, match="debug: wanted True or False, got 1"):
        make_engine(TinyModel(), debug=1)
