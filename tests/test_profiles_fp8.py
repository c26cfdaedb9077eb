"""The accuracy report of FP8 KV: it sees the rounding, and counts bytes as the engine does."""

import pytest
import torch

from graphattn.models import adapt
from profiles.benchmarks import fp8
from tests.tiny_llama import tiny_llama


def test_it_reports_what_rounding_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "MEMORY", 1 << 16)
    texts = [[7, 1, 9, 30, 2, 200, 11, 54], [3, 2, 1]]
    work = fp8.Workload("tiny", adapt(tiny_llama(), fuse=False), texts[0] * 3, texts, texts, 4)
    bf16, *eights = fp8.compare(work)
    assert [r["kv"] for r in (bf16, *eights)] == [
        "bf16",
        "fp8, scale 1",
        "fp8, per tensor",
        "fp8, per head",
    ]
    for record in eights:
        assert 5 * bf16["attention_median"] < record["attention_median"] < 0.2
        assert 2 * record["bytes_per_token"] == bf16["bytes_per_token"]
        assert 0 <= record["greedy"] <= 1


def test_the_dense_step_is_the_model_for_exact_kv() -> None:
    model = tiny_llama()
    ids = [5, 9, 77, 31, 8]
    step = fp8.DenseStep(ids, adapt(model, fuse=False).attention_layers, torch.float32)
    with torch.no_grad():
        got, wanted = adapt(model, fuse=False)(step), model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    assert step.errors == [0.0, 0.0]
