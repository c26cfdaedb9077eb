"""Graph and StepBuffers on a CUDA device."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

import graphattn
from tests.tiny_llama import tiny_llama

pytestmark = pytest.mark.gpu

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_replays_stand_in_the_callers_stream() -> None:
    """Written just before and read just after, without a wait of the host."""
    x, total = torch.zeros(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")

    def add() -> Tensor:
        total.add_(x)
        return total * 2

    with graphattn.Graph(add, device="cuda") as graph:
        assert graph.info.node_count >= 2
        assert not total.any()
        results = []
        for value in range(1, 6):
            x.fill_(value)
            graph.replay()
            results.append(graph.outputs.clone())
        assert [int(result[0]) for result in results] == [2, 6, 12, 20, 30]
        report = graphattn.verify(graph, inputs=lambda i: x.fill_(i), watch={"total": total})
        assert report.ok, report


def test_an_engine_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured as CUDA graphs: eager and replay equal, tokens of `generate` on the same device."""
    monkeypatch.syspath_prepend(EXAMPLES)
    own_engine = importlib.import_module("own_engine")
    reference = tiny_llama().cuda()
    model = own_engine.Llama()
    model.load_state_dict(
        {name.removeprefix("model."): x for name, x in reference.state_dict().items()}
    )
    engine = own_engine.Engine(model.cuda(), "cuda")
    prompts = [list(range(1, n + 1)) for n in (1, 60, 7, 33, 8, 20, 2, 15, 9, 40)]
    jobs = [own_engine.Job([*prompt], len(prompt) + 12) for prompt in prompts]
    for job in jobs:
        engine.submit(job)
    while engine.running or engine.waiting:
        engine.step()
    for prompt, job in zip(prompts, jobs, strict=True):
        ids = torch.tensor([prompt], device="cuda")
        want = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )
        assert job.tokens == want[0].tolist()
