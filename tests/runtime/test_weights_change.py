"""Weights that change under an engine: in place, unseen by torch's counters, and elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphattn import DCP, ConfigError, DraftModel, NGram, Plan, VirtualGroup, WeightsMovedError
from graphattn.engine import Engine
from tests.models.families import tiny
from tests.runtime.serving import make_engine, prompts
from tests.runtime.tiny_model import TinyModel
from tests.runtime.tiny_recurrent import TinyRecurrent

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]  # two pages: a prefix of another model's would show
PREPACKED: dict[str, Any] = {"backend": "host", "prepack": True}
WAYS = pytest.mark.parametrize(
    "options",
    [{"backend": "eager"}, {"backend": "host"}, PREPACKED],
    ids=["eager", "host", "packed"],
)


def wide(seed: int) -> TinyModel:
    """Its linears are large enough to be packed."""
    return TinyModel(hidden=256, head_dim=64, num_q_heads=6, num_kv_heads=2, seed=seed)


def served(engine: Engine, count: int = 6) -> list[int]:
    (done,) = engine.generate([PROMPT], max_new_tokens=count)
    return list(done.token_ids)


def in_place(model: nn.Module, other: nn.Module) -> None:
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs)


def state_dict(model: nn.Module, other: nn.Module) -> None:
    model.load_state_dict(other.state_dict())


def through_data(model: nn.Module, other: nn.Module) -> None:
    """torch counts no write through `data`."""
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        mine.data.copy_(theirs)


@pytest.mark.parametrize("update", [in_place, state_dict])
@WAYS
def test_writes_in_place_are_seen_by_the_next_step(
    options: dict[str, Any], update: Callable[[nn.Module, nn.Module], None]
) -> None:
    model, other = wide(0), wide(1)
    with make_engine(model, **options) as engine:
        assert served(engine) == model.generate(PROMPT, 6)
        before = model.generate(PROMPT, 6)
        update(model, other)
        assert served(engine) == other.generate(PROMPT, 6) != before
        update(model, wide(0))
        assert served(engine) == before


@WAYS
def test_a_running_request_goes_on_with_the_new_weights(options: dict[str, Any]) -> None:
    """Its KV of the old ones stays: the tokens to come are neither model's alone, but those of
    every backend."""
    model, other = wide(0), wide(1)
    with make_engine(model, run_ahead=1, **options) as engine:
        request = engine.submit(PROMPT, max_new_tokens=9)
        while len(request.token_ids) < 4:
            engine.step()
            engine.poll()
        head = len(request.token_ids)
        in_place(model, other)
        while engine.busy:
            engine.step()
        assert request.token_ids[:head] == wide(0).generate(PROMPT, head)
        assert request.token_ids != wide(0).generate(PROMPT, 9)


@WAYS
def test_an_optimizer_step_is_seen(options: dict[str, Any]) -> None:
    model = wide(0)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    with make_engine(model, **options) as engine:
        served(engine)
        model.dense_logits(PROMPT)[:, 7].sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.05, maximize=True).step()
        assert served(engine) == model.generate(PROMPT, 6)


@WAYS
def test_writes_that_torch_does_not_count(options: dict[str, Any]) -> None:
    """Their prefixes are still known until the engine is told; packed weights follow at once."""
    model, other = wide(0), wide(1)
    with make_engine(model, prefix_reuse=False, **options) as engine:
        served(engine)
        through_data(model, other)
        assert served(engine) == other.generate(PROMPT, 6)
    with make_engine(model, **options) as engine:
        served(engine)
        through_data(model, wide(0))
        engine.weights_changed()
        assert served(engine) == wide(0).generate(PROMPT, 6)


def test_a_single_element_that_no_sample_shows() -> None:
    model = wide(0)
    with make_engine(model, prefix_reuse=False, **PREPACKED) as engine:
        before = served(engine)
        model.qkv[0].weight.data[0, 1] = 1e4
        engine.weights_changed()
        assert served(engine) == model.generate(PROMPT, 6) != before


def exchanged_parameter(model: nn.Module, other: nn.Module) -> str:
    model.get_submodule("out.1").weight = other.get_submodule("out.1").weight
    return "out.1.weight"


def exchanged_data(model: nn.Module, other: nn.Module) -> str:
    model.get_submodule("qkv.0").weight.data = other.get_submodule("qkv.0").weight.data.clone()
    return "qkv.0.weight"


def assigned(model: nn.Module, other: nn.Module) -> str:
    model.load_state_dict(other.state_dict(), assign=True)
    return "embed.weight, position.weight, qkv.0.weight and 8 more"


def moved(model: nn.Module, other: nn.Module) -> str:
    """To another dtype and back: `to` puts other memory behind the same parameters."""
    model.former = [p.data for p in model.parameters()]  # else the new may lie where they lay
    model.to(torch.float64).to(torch.float32)
    return "embed.weight, position.weight, qkv.0.weight and 8 more"


EXCHANGES = [exchanged_parameter, exchanged_data, assigned, moved]


@pytest.mark.parametrize("exchange", EXCHANGES)
@WAYS
def test_exchanged_weights_are_named_and_captured_anew(
    options: dict[str, Any], exchange: Callable[[nn.Module, nn.Module], str]
) -> None:
    model, other = wide(0), wide(1)
    with make_engine(model, **options) as engine:
        before = served(engine)
        names = exchange(model, other)
        steps = engine.stats().steps
        request = engine.submit(PROMPT, max_new_tokens=6)
        with pytest.raises(WeightsMovedError, match=f"{names}: captured at another address"):
            engine.step()
        assert engine.stats().steps == steps, "nothing was launched"
        engine.recapture()
        while engine.busy:
            engine.step()
        assert request.token_ids == model.generate(PROMPT, 6)
        assert (request.token_ids == before) == (exchange is moved)
        in_place(model, wide(2))
        assert served(engine) == wide(2).generate(PROMPT, 6)


def test_weights_put_back_need_no_recapture() -> None:
    model = wide(0)
    with make_engine(model) as engine:
        weight = model.qkv[0].weight
        model.qkv[0].weight = nn.Parameter(weight.detach().clone())
        with pytest.raises(WeightsMovedError):
            engine.generate([PROMPT], max_new_tokens=2)
        model.qkv[0].weight = weight
        while engine.busy:
            engine.step()
        assert served(engine) == model.generate(PROMPT, 6)


def test_a_single_weight_is_found_while_nothing_is_admitted() -> None:
    """Each step looks at a part of the weights; after `LOOKS` steps all have been looked at."""
    model = TinyModel()
    with make_engine(model, max_seq_len=90) as engine:
        request = engine.submit(PROMPT, max_new_tokens=60)
        while len(request.token_ids) < 4:
            engine.step()
            engine.poll()
        model.out[1].bias.data = model.out[1].bias.data.clone()
        with pytest.raises(WeightsMovedError, match=r"out\.1\.bias: captured"):  # noqa: PT012
            while engine.busy:
                engine.step()
        assert not request.finished


def test_a_request_that_only_waits_costs_no_look_at_every_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[bool] = []
    with make_engine(TinyModel(), max_batch=1) as engine:
        check = engine._runner.weights.check
        monkeypatch.setattr(
            engine._runner.weights, "check", lambda *, all: (looks.append(all), check(all=all))
        )
        for _ in range(3):
            engine.submit(PROMPT, max_new_tokens=12)
        while engine.busy:
            if not engine.step():
                engine.poll()
    assert looks.count(True) >= 3  # each time that a slot was free for one
    assert looks.count(False) > 20


def test_a_plan_that_empties_a_slot_for_another_request_finds_no_old_prefix() -> None:
    model, other = TinyModel(), TinyModel(seed=1)
    with make_engine(model, max_batch=1) as engine:
        first = engine.submit(PROMPT, max_new_tokens=12)
        while len(first.token_ids) < 3:
            engine.step()
            engine.poll()
        second = engine.submit(PROMPT, max_new_tokens=6)
        in_place(model, other)
        assert engine.launch(Plan(prefill=((second, len(PROMPT)),), preempt=(first,)))
        engine.cancel(first)
        while engine.busy:
            engine.step()
            engine.poll()
        assert engine.stats().prompt_tokens_reused == 0
    assert second.token_ids == other.generate(PROMPT, 6)


def test_running_requests_go_on_over_a_kv_of_the_new_weights() -> None:
    model, other = TinyRecurrent(), TinyRecurrent(seed=1)
    jobs = prompts(6, seed=9, longest=20)
    with make_engine(model, speculate=NGram(2), run_ahead=3) as engine:
        requests = [engine.submit(p, max_new_tokens=12) for p in jobs]
        while not any(len(r.token_ids) > 3 for r in requests):
            engine.step()
            engine.poll()
        for name in ("taps", "gates", "counted"):
            getattr(model, name).copy_(getattr(other, name))
        model.load_state_dict(other.state_dict(), assign=True)
        engine.recapture()
        heads = [list(r.token_ids) for r in requests]
        while engine.busy:
            engine.step()
    assert any(heads)
    for prompt, head, request in zip(jobs, heads, requests, strict=True):
        assert request.token_ids == head + other.generate(prompt + head, 12 - len(head))


@pytest.mark.parametrize(
    "options", [{"dcp": DCP(VirtualGroup(2), 2)}, PREPACKED], ids=["dcp", "packed"]
)
def test_of_a_drafter_too(options: dict[str, Any]) -> None:
    model, small = TinyModel(), TinyModel(num_q_heads=4, head_dim=4, windows=(3,), seed=5)
    with make_engine(model, speculate=DraftModel(small, 2), **options) as engine:
        served(engine)
        small.head.weight = nn.Parameter(small.head.weight.detach().clone())
        with pytest.raises(WeightsMovedError, match=r"draft\.head\.weight"):
            served(engine)
        engine.recapture()
        while engine.busy:
            engine.step()
        assert served(engine) == model.generate(PROMPT, 6)


def test_a_buffer_counts_as_a_weight() -> None:
    model = TinyModel()
    model.register_buffer("table", torch.zeros(3))
    with make_engine(model) as engine:
        model.table = torch.ones(3)
        with pytest.raises(WeightsMovedError, match="table: captured"):
            served(engine)


def test_other_shapes_are_refused_and_nothing_changes() -> None:
    model = TinyModel()
    with make_engine(model) as engine:
        weight, tokens = model.out[0].weight, served(engine)
        model.out[0].weight = nn.Parameter(torch.zeros(24, 5))
        with pytest.raises(ConfigError, match=r"out\.0\.weight: wanted torch\.float32 \[24, 48\]"):
            engine.recapture()
        del model.out[0].weight
        with pytest.raises(ConfigError, match=r"out\.0\.weight: .* got None"):
            engine.recapture()
        model.out[0].weight = weight
        assert served(engine) == tokens


@pytest.mark.parametrize("family", ["llama", "gpt-oss", "gemma3"])
@pytest.mark.parametrize("backend", ["host", "eager"])
def test_transformers_models_follow_their_owner(family: str, backend: str) -> None:
    """gpt-oss: sinks, which attention reads in fp32; gemma3: buffers of two rotations."""
    model, other = tiny(family), tiny(family, seed=1)
    fresh = [list(greedy(other))]
    with make_engine(model, backend=backend) as engine:
        assert served(engine) == greedy(model)
        in_place(model, other)
        assert [served(engine)] == fresh
        in_place(model, tiny(family))
        model.load_state_dict(other.state_dict(), assign=True)
        with pytest.raises(WeightsMovedError, match=r"model\.embed_tokens\.weight"):
            served(engine)
        engine.recapture()
        while engine.busy:
            engine.step()
        assert [served(engine)] == fresh


def test_tied_weights_stay_tied() -> None:
    model = tiny("llama", tie_word_embeddings=True)
    other = tiny("llama", seed=1, tie_word_embeddings=True)
    with make_engine(model) as engine:
        model.model.embed_tokens.weight = other.model.embed_tokens.weight
        with pytest.raises(WeightsMovedError, match=r"model\.embed_tokens\.weight"):
            served(engine)
        model.tie_weights()
        engine.recapture()
        while engine.busy:
            engine.step()
        assert served(engine) == greedy(model)


def greedy(model: Any) -> list[int]:
    tokens = torch.tensor([PROMPT])
    out: Tensor = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=6, do_sample=False
    )
    return [int(t) for t in out[0, len(PROMPT) :]]
