"""Latent layers on a GPU: `pytest -m gpu`. Not yet run on one."""

from __future__ import annotations

import pytest
import torch

from graphattn import DCP, VirtualGroup
from tests.models.latent_families import tiny_latent
from tests.models.test_transformers_generate import NEW_TOKENS, _generate, _prompts, _verdicts
from tests.runtime.serving import serve
from tests.runtime.test_engine_gpu import CUDA, JOBS, capture
from tests.runtime.tiny_latent import TinyLatent

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", ["cuda", "eager"])
@pytest.mark.parametrize(("latent_dim", "value_dim"), [(12, 7), (80, 64), (576, 512)])
def test_tokens_equal_recomputation(backend: str, latent_dim: int, value_dim: int) -> None:
    model = TinyLatent(latent_dim=latent_dim, value_dim=value_dim).to(CUDA)
    with capture(model, backend=backend) as engine:
        for request, (prompt, count) in zip(serve(engine, JOBS), JOBS, strict=True):
            assert request.token_ids == model.generate(prompt, count)
        assert engine.stats().fallbacks == 0


@pytest.mark.parametrize("reduce", ["ag_rs", "a2a"])
@pytest.mark.parametrize(("W", "I"), [(2, 1), (4, 16)])
def test_virtual_ranks(W: int, I: int, reduce: str) -> None:
    model = TinyLatent(latent_dim=80, value_dim=64).to(CUDA)
    dcp = DCP(VirtualGroup(W), I, reduce)  # type: ignore[arg-type]
    with capture(model, dcp=dcp) as engine:
        report = engine.verify(50)
        assert report.ok, str(report)
        for request, (prompt, count) in zip(serve(engine, JOBS), JOBS, strict=True):
            assert request.token_ids == model.generate(prompt, count)


@pytest.mark.parametrize("family", ["deepseek-v3-yarn", "deepseek-v2"])
def test_deepseek_against_generate(family: str) -> None:
    """fp32 with experts that copy their weights; then bf16 with grouped ones where the GPU can."""
    model = tiny_latent(family).to(CUDA)
    model.set_experts_implementation("batched_mm")
    _compare(model)
    if torch.cuda.get_device_capability(CUDA) >= (9, 0):
        model = model.bfloat16()
        model.set_experts_implementation("grouped_mm")
        _compare(model)


def _compare(model: torch.nn.Module) -> None:
    want = [_generate(model, prompt) for prompt in _prompts()]
    with capture(model, max_seq_len=64) as engine:
        got = engine.generate(_prompts(), max_new_tokens=NEW_TOKENS)
    verdicts = _verdicts(model, want, got)
    assert all(v.equal or v.near_tie for v in verdicts), [str(v) for v in verdicts]
    assert sum(not v.equal for v in verdicts) <= 3
