"""A real model: SmolLM2-135M-Instruct, token by token against transformers' `generate`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import graphattn
from graphattn.demo import smollm2
from graphattn.demo.runs import run_generate
from graphattn.demo.show import PROMPTS
from graphattn.parity import compare
from graphattn.text import Loaded, encode, load

NEW_TOKENS = 64
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def smol() -> Loaded:
    return load(smollm2.folder(), torch.device("cpu"))


@pytest.fixture(scope="module")
def prompts(smol: Loaded) -> list[list[int]]:
    return encode(smol.tokenizer, PROMPTS)


@pytest.fixture(scope="module")
def reference(smol: Loaded, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    return list(run_generate(smol.model, prompts, NEW_TOKENS).token_ids)


def differences(
    smol: Loaded,
    prompts: list[list[int]],
    reference: list[tuple[int, ...]],
    done: list[graphattn.Completion],
) -> list[str]:
    verdicts = [
        compare(smol.model, prompt, want, got.token_ids)
        for prompt, want, got in zip(prompts, reference, done, strict=True)
    ]
    return [str(v) for v in verdicts if not v.equal]


def test_eight_prompts_of_64_tokens(
    smol: Loaded, prompts: list[list[int]], reference: list[tuple[int, ...]]
) -> None:
    with graphattn.capture(smol.model, 8, max_seq_len=256, max_tokens=128) as engine:
        done = engine.generate(prompts, max_new_tokens=NEW_TOKENS)
        assert engine.stats().fallbacks == 0
    assert sum(map(len, reference)) == 8 * NEW_TOKENS
    assert differences(smol, prompts, reference, done) == []


@pytest.mark.slow
def test_replay_equals_eager_bitwise_without_prepacking(
    smol: Loaded, prompts: list[list[int]], reference: list[tuple[int, ...]]
) -> None:
    options = {"max_seq_len": 256, "max_tokens": 128, "prepack": False}
    with graphattn.capture(smol.model, 8, **options) as engine:
        report = engine.verify(20)
        assert report.ok, str(report)
        done = engine.generate(prompts, max_new_tokens=NEW_TOKENS)
    assert differences(smol, prompts, reference, done) == []


LAYOUTS = [
    (2, 1, "ag_rs", 16),
    (2, 2, "a2a", 64),
    (2, 3, "ag_rs", 64),
    (4, 1, "a2a", 16),
    (4, 16, "ag_rs", 16),
    (4, 64, "a2a", 64),
]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["host", "eager"])
@pytest.mark.parametrize(("W", "I", "reduce", "page_size"), LAYOUTS)
def test_a_cache_over_virtual_ranks(
    smol: Loaded,
    prompts: list[list[int]],
    reference: list[tuple[int, ...]],
    W: int,
    I: int,
    reduce: str,
    page_size: int,
    backend: str,
) -> None:
    dcp = graphattn.DCP(graphattn.VirtualGroup(W), I, reduce)  # type: ignore[arg-type]
    options = {"max_seq_len": 256, "max_tokens": 128, "page_size": page_size, "dcp": dcp}
    with graphattn.capture(smol.model, 8, backend=backend, **options) as engine:
        done = engine.generate(prompts, max_new_tokens=NEW_TOKENS)
    assert differences(smol, prompts, reference, done) == []


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "interleave", "reduce"), [(2, 3, "a2a"), (4, 16, "ag_rs")])
def test_the_command_over_processes(ranks: int, interleave: int, reduce: str) -> None:
    """torchrun as users type it; the text is the one that a single process writes."""
    generate = ["-m", "graphattn", "generate", "--model", "smollm2", "--max-new-tokens", "24"]
    generate += ["--max-seq-len", "256", "--prompt", PROMPTS[0], "--prompt", PROMPTS[1]]
    spread = ["--dcp", str(ranks), "--interleave", str(interleave), "--reduce", reduce]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    one = _output([sys.executable, *generate])
    many = _output([sys.executable, *torchrun, *generate, *spread])
    assert one.strip()
    assert many == one


def _output(command: list[str]) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
