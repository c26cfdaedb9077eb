"""DeepSeek's families, whole engine against transformers' `generate`, token by token.

Prompts as of `test_transformers_generate`: more than slots, longer than a step, prefilled in chunks
beside decode rows, over pages of 4. The weights are random, the experts routed and shared.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import graphattn
from graphattn.engine import Engine
from graphattn.parity import Verdict
from tests.models.latent_families import LATENT_FAMILIES, tiny_latent
from tests.models.test_transformers_generate import NEW_TOKENS, _generate, _prompts, _verdicts
from tests.runtime.test_replay import HUGE


@cache
def _reference(family: str) -> tuple[PreTrainedModel, list[list[int]]]:
    model = tiny_latent(family)
    return model, [_generate(model, prompt) for prompt in _prompts()]


def _capture(model: PreTrainedModel, **options: Any) -> Engine:
    sizes = {"max_seq_len": 64, "max_tokens": 16, "page_size": 4}
    return graphattn.capture(model, 3, **(sizes | options))


def _virtual(W: int, I: int, reduce: str) -> graphattn.DCP:
    return graphattn.DCP(graphattn.VirtualGroup(W), I, reduce)  # type: ignore[arg-type]


def _check(engine: Engine, model: PreTrainedModel, want: list[list[int]]) -> None:
    got = engine.generate(_prompts(), max_new_tokens=NEW_TOKENS)
    verdicts: list[Verdict] = _verdicts(model, want, got)
    assert all(verdict.equal for verdict in verdicts), [str(v) for v in verdicts]
    assert engine.stats().fallbacks == 0
    assert len({token for tokens in want for token in tokens}) > 10


def _matrix(quick: set[tuple[Any, ...]], *axes: Sequence[Any]) -> list[Any]:
    """All combinations; those beyond `quick` are slow."""
    every = list(itertools.product(*axes))
    assert quick <= set(every)
    return [x if x in quick else pytest.param(*x, marks=pytest.mark.slow) for x in every]


BACKENDS = ("host", "eager")
QUICK = {("deepseek-v3", "host"), ("deepseek-v3", "eager"), ("deepseek-v2-lite", "host")}


@pytest.mark.parametrize(("family", "backend"), _matrix(QUICK, LATENT_FAMILIES, BACKENDS))
def test_tokens_equal_generate(family: str, backend: str) -> None:
    model, want = _reference(family)
    with _capture(model, backend=backend) as engine:
        _check(engine, model, want)


DEEPSEEK = ("deepseek-v3", "deepseek-v3-yarn", "deepseek-v2", "deepseek-v2-lite")
QUICK_LAYOUTS = {
    ("deepseek-v3", 2, 16, "a2a", "host"),
    ("deepseek-v3-yarn", 4, 1, "ag_rs", "host"),
    ("deepseek-v2", 2, 1, "ag_rs", "eager"),
}
LAYOUTS = _matrix(QUICK_LAYOUTS, DEEPSEEK, (1, 2, 4), (1, 16), ("ag_rs", "a2a"), BACKENDS)


@pytest.mark.parametrize(("family", "W", "I", "reduce", "backend"), LAYOUTS)
def test_a_cache_over_ranks(family: str, W: int, I: int, reduce: str, backend: str) -> None:
    """Every rank holds whole latents of its positions."""
    model, want = _reference(family)
    with _capture(model, dcp=_virtual(W, I, reduce), backend=backend) as engine:
        _check(engine, model, want)


@pytest.mark.slow
def test_the_widths_of_deepseek_v3() -> None:
    """512 + 64 values in the cache, 128 heads of 128 + 64 and 128 values."""
    widths = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    heads = {"num_attention_heads": 128, "num_key_value_heads": 128, "v_head_dim": 128}
    model = tiny_latent("deepseek-v3", num_hidden_layers=2, **widths, **heads)
    prompts = _prompts()[1:3]
    want = [_generate(model, prompt) for prompt in prompts]
    with _capture(model, dcp=_virtual(2, 16, "a2a"), prepack=False) as engine:
        got = engine.generate(prompts, max_new_tokens=NEW_TOKENS)
        report = engine.report()
    assert [list(done.token_ids) for done in got] == want
    assert report.kv_bytes_per_token == 2 * 576 * 4
    assert report.notes[0].endswith("576 values per token and layer instead of 40960")


def test_what_nobody_wrote_is_never_read() -> None:
    """NaN in every page and huge ids in the page table before the first request."""
    model, want = _reference("deepseek-v3")
    with _capture(model, dcp=_virtual(2, 3, "ag_rs")) as engine:
        for pool in engine._runner.pools().values():
            pool.fill_(float("nan"))
        engine._runner.memory.state.page_table.fill_(HUGE)
        _check(engine, model, want)


def test_bfloat16_differs_only_where_rounding_decides() -> None:
    """W_UK goes into the query here and into the keys there: one rounding more or less."""
    model = tiny_latent("deepseek-v3").bfloat16()
    want = [_generate(model, prompt) for prompt in _prompts()]
    with _capture(model) as engine:
        got = engine.generate(_prompts(), max_new_tokens=NEW_TOKENS)
    verdicts = _verdicts(model, want, got)
    assert all(v.equal or v.near_tie for v in verdicts), [str(v) for v in verdicts]
    assert sum(not v.equal for v in verdicts) <= 3


@pytest.mark.parametrize(
    "family", ["deepseek-v3", pytest.param("deepseek-v2-lite", marks=pytest.mark.slow)]
)
def test_replay_verifies_and_audits_clean(family: str) -> None:
    """With experts that any GPU can run; rotation by complex numbers and by pairs."""
    model = tiny_latent(family)
    model.set_experts_implementation("batched_mm")
    with _capture(model, prepack=False, dcp=_virtual(2, 16, "a2a")) as engine:
        report = engine.verify(10)
        assert report.ok, str(report)
        audit = engine.audit()
        assert not audit.findings, str(audit)


@pytest.mark.parametrize("prepack", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_weights_updated_in_place_are_seen_by_the_next_replay(prepack: bool) -> None:
    """kv_b_proj too, of which a replay reads both halves where they lie."""
    model, other = tiny_latent("deepseek-v3"), tiny_latent("deepseek-v3", seed=1)
    prompt = _prompts()[2]
    with _capture(model, prepack=prepack) as engine, torch.no_grad():
        (before,) = engine.generate([prompt], max_new_tokens=NEW_TOKENS)
        named = dict(other.named_parameters()) | dict(other.named_buffers())
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "kv_b_proj" not in name:
                tensor.copy_(named[name])
        (between,) = engine.generate([prompt], max_new_tokens=NEW_TOKENS)
        assert list(between.token_ids) == _generate(model, prompt)
        for name, parameter in model.named_parameters():
            if "kv_b_proj" in name:
                parameter.copy_(named[name])
        (after,) = engine.generate([prompt], max_new_tokens=NEW_TOKENS)
        assert list(after.token_ids) == _generate(other, prompt)
    assert len({before.token_ids, between.token_ids, after.token_ids}) == 3


def test_report_has_the_swap_and_the_bytes() -> None:
    model, _ = _reference("deepseek-v2")
    with _capture(model, backend="eager", dcp=_virtual(2, 1, "ag_rs")) as engine:
        report = engine.report()
    config = model.config
    latent = config.kv_lora_rank + config.qk_rope_head_dim
    assert report.kv_bytes_per_token == config.num_hidden_layers * latent * 4
    assert report.partial_traffic <= 0.15
    assert report.notes[:2] == (
        "latent attention: 3 layers, 28 values per token and layer instead of 96",
        "experts: grouped_mm",
    )


def test_experts_that_read_the_routing_on_the_host_are_named() -> None:
    """LongCat's have no implementation to choose; capture names the line."""
    with pytest.raises(graphattn.CaptureError, match=r"nonzero[^:]*(\n.*)*LongcatFlashExperts"):
        _capture(tiny_latent("longcat"))
