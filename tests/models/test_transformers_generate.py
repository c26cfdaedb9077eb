"""Whole engine against transformers' `generate` on the same model object, token by token.

Three slots for seven prompts: requests wait, slots are used again, prompts longer than a step
(16 places) are prefilled in chunks beside decode rows, and all outgrow the windows (7) and
cross pages of 4.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

import graphattn
from graphattn.parity import Verdict, compare
from tests.models.families import VOCAB, tiny

NEW_TOKENS = 14


def _prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in (1, 5, 37, 4, 9, 16, 2)]


def _generate(model: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    ids = torch.tensor([list(prompt)], device=model.device)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


@cache
def _reference(family: str) -> tuple[PreTrainedModel, list[list[int]]]:
    model = tiny(family)
    if family == "gpt-oss":
        # grouped_mm, the default, asks the driver about the device: not for an audit without GPU.
        model.set_experts_implementation("batched_mm")
    return model, [_generate(model, prompt) for prompt in _prompts()]


def _serve(model: PreTrainedModel, backend: str) -> list[graphattn.Completion]:
    with graphattn.capture(
        model, 3, max_seq_len=64, max_tokens=16, page_size=4, backend=backend
    ) as engine:
        return engine.generate(_prompts(), max_new_tokens=NEW_TOKENS)


def _verdicts(
    model: PreTrainedModel, want: list[list[int]], got: list[graphattn.Completion]
) -> list[Verdict]:
    return [
        compare(model, prompt, reference, completion.token_ids)
        for prompt, reference, completion in zip(_prompts(), want, got, strict=True)
    ]


@pytest.mark.parametrize("backend", ["host", "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gemma2", "gpt-oss"])
def test_tokens_equal_generate(family: str, backend: str) -> None:
    model, want = _reference(family)
    assert len({token for tokens in want for token in tokens}) > 15, "tokens must vary"
    verdicts = _verdicts(model, want, _serve(model, backend))
    assert all(verdict.equal for verdict in verdicts), [str(v) for v in verdicts]


@pytest.mark.parametrize("family", ["mistral", "qwen3-moe", "gpt2", "cohere2"])
def test_other_families(family: str) -> None:
    model, want = _reference(family)
    verdicts = _verdicts(model, want, _serve(model, "host"))
    assert all(verdict.equal for verdict in verdicts), [str(v) for v in verdicts]


def test_bfloat16_differs_only_where_rounding_decides() -> None:
    """`generate` runs each prompt alone, the engine in batches: other shapes, other rounding."""
    model = tiny("llama").bfloat16()
    want = [_generate(model, prompt) for prompt in _prompts()]
    verdicts = _verdicts(model, want, _serve(model, "host"))
    assert all(v.equal or v.near_tie for v in verdicts), [str(v) for v in verdicts]
    assert sum(not v.equal for v in verdicts) <= 2


def test_owner_generates_while_the_engine_lives() -> None:
    model, want = _reference("gemma3")
    settings = model.config._attn_implementation
    with graphattn.capture(model, 2, max_seq_len=64, max_tokens=16, backend="eager") as engine:
        request = engine.submit(_prompts()[2], max_new_tokens=NEW_TOKENS)
        engine.step()
        assert _generate(model, _prompts()[2]) == want[2]
        while engine.busy:
            engine.step()
            engine.poll()
    assert request.token_ids == want[2]
    assert model.config._attn_implementation == settings


def test_stops_where_generate_stops() -> None:
    """The end token of the generation configuration, as `generate` has it."""
    model, want = _reference("qwen3")
    end = want[2][5]
    model.generation_config.eos_token_id = end
    try:
        stopped = [_generate(model, prompt) for prompt in _prompts()]
        completions = _serve(model, "eager")
    finally:
        model.generation_config.eos_token_id = None
    assert [list(c.token_ids) for c in completions] == stopped
    assert completions[2].finish_reason is graphattn.FinishReason.STOP
    assert len(stopped[2]) < NEW_TOKENS


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss"])
def test_audit_finds_nothing(family: str) -> None:
    """No host read, no data-dependent shape, no copy between host and device in the step."""
    model, _ = _reference(family)
    with graphattn.capture(model, 3, max_seq_len=64, max_tokens=16, backend="eager") as engine:
        report = engine.audit()
    assert not report.findings, str(report)
