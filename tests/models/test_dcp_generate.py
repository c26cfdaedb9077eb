"""A cache over ranks against transformers' `generate`: families, layouts, both reductions."""

from __future__ import annotations

import pytest

import graphattn
from tests.models.test_transformers_generate import NEW_TOKENS, _prompts, _reference, _verdicts

LAYOUTS = [
    (2, 1, "a2a", 16, "host"),
    (4, 2, "ag_rs", 16, "host"),
    (4, 3, "a2a", 64, "eager"),
    (2, 16, "ag_rs", 64, "host"),
    (2, 64, "a2a", 16, "eager"),
]


@pytest.mark.parametrize(("W", "I", "reduce", "page_size", "backend"), LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt-oss"])
def test_tokens_equal_generate(
    family: str, W: int, I: int, reduce: str, page_size: int, backend: str
) -> None:
    model, want = _reference(family)
    dcp = graphattn.DCP(graphattn.VirtualGroup(W), I, reduce)  # type: ignore[arg-type]
    options = {"max_seq_len": 64, "max_tokens": 16, "page_size": page_size, "backend": backend}
    with graphattn.capture(model, 3, dcp=dcp, **options) as engine:
        got = engine.generate(_prompts(), max_new_tokens=NEW_TOKENS)
    verdicts = _verdicts(model, want, got)
    assert all(verdict.equal for verdict in verdicts), [str(v) for v in verdicts]
