"""The example of a model of one's own: it runs, is short, and is served right."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from types import ModuleType

import pytest
import torch

import graphattn
from tests.models.dense_step import DenseStep

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_model", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 100


def test_example_runs(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    example.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" (")[0] for line in lines[:3]] == ["b'Hello'", "b'A captured step'", "b'x'"]
    assert all(line.endswith("length") for line in lines[:3])


@torch.no_grad()
def test_served_tokens_are_those_of_a_recomputation(example: ModuleType) -> None:
    """Greedy decoding that feeds the whole sequence again for every token."""
    torch.manual_seed(1)
    model = example.ByteModel().eval()
    rng = random.Random(0)
    prompts = [[rng.randrange(1, 256) for _ in range(n)] for n in (1, 30, 7, 12)]
    want = []
    for prompt in prompts:
        tokens = list(prompt)
        while len(tokens) < len(prompt) + 8 and tokens[-1] != 0:
            step = DenseStep(torch.tensor(tokens), model.attention_layers)
            tokens.append(int(model(step)[-1].argmax()))
        want.append(tokens[len(prompt) :])
    with graphattn.capture(model, 3, max_seq_len=64, max_tokens=16, page_size=8) as engine:
        got = engine.generate(prompts, max_new_tokens=8)
    assert [list(completion.token_ids) for completion in got] == want
