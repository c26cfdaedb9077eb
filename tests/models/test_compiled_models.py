"""Models of torch.compile: the same tokens, compiled where their owner's are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphattn
from graphattn import DraftModel
from graphattn.models import adapt
from tests.models.families import tiny
from tests.runtime.serving import make_engine, prompts, serve
from tests.runtime.tiny_model import TinyModel
from tests.runtime.tiny_recurrent import TinyRecurrent

JOBS = [(p, 2 + 7 * i % 9) for i, p in enumerate(prompts(5, seed=41, longest=20))]


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Backend:
    """Counts, and runs the traced operations as they are."""

    def __init__(self) -> None:
        self.graphs = self.runs = 0

    def __call__(self, gm: Any, inputs: list[Tensor]) -> Callable[..., Any]:
        self.graphs += 1

        def run(*args: Tensor) -> Any:
            self.runs += 1
            return gm.forward(*args)

        return run


def around(model: nn.Module, backend: Backend) -> Any:
    return torch.compile(model, backend=backend, fullgraph=True)


def in_place(model: nn.Module, backend: Backend) -> Any:
    model.compile(backend=backend, fullgraph=True)
    return model


def a_layer(model: Any, backend: Backend) -> Any:
    model.model.layers[0] = torch.compile(model.model.layers[0], backend=backend)
    return model


SLOW = pytest.mark.slow  # the compiler takes its time


@pytest.mark.parametrize(
    ("compiled", "backend"),
    [
        (around, "host"),
        (in_place, "host"),
        (a_layer, "eager"),
        pytest.param(around, "eager", marks=SLOW),
        pytest.param(in_place, "eager", marks=SLOW),
    ],
)
def test_a_transformers_model(compiled: Any, backend: str) -> None:
    with make_engine(tiny("llama"), backend=backend) as engine:
        expected = [r.token_ids for r in serve(engine, JOBS)]
    counts = Backend()
    model = compiled(tiny("llama"), counts)
    with make_engine(model, backend=backend) as engine:
        assert [r.token_ids for r in serve(engine, JOBS)] == expected
        steps = engine.stats().steps
        # a host graph replays plain operations; an eager one runs the compiled code
        assert counts.runs == (steps if backend == "eager" else 0)
        report = engine.verify(3)
        assert report.ok, str(report)
        assert engine.audit().findings == ()


@pytest.mark.parametrize("model_class", [TinyModel, pytest.param(TinyRecurrent, marks=SLOW)])
def test_a_model_of_ones_own(model_class: type[TinyModel]) -> None:
    model, counts = model_class(windows=(5,)), Backend()
    expected = [model.generate(p, n) for p, n in JOBS]
    for backend in ("host", "eager"):
        with make_engine(around(model, counts), backend=backend) as engine:
            assert [r.token_ids for r in serve(engine, JOBS)] == expected
    assert counts.runs == engine.stats().steps
    assert counts.graphs <= 3, "one per shape until torch lets the shape vary"


@SLOW
def test_a_draft_model() -> None:
    model, counts = TinyModel(), Backend()
    with make_engine(
        model, speculate=DraftModel(around(tiny("llama"), counts), 2), backend="eager"
    ) as engine:
        for request, (prompt, count) in zip(serve(engine, JOBS), JOBS, strict=True):
            assert request.token_ids == model.generate(prompt, count)
    assert counts.runs > 0


@SLOW
def test_a_compiled_model_follows_its_owner() -> None:
    owner, other, counts = tiny("llama"), tiny("llama", seed=1), Backend()
    with make_engine(other) as engine:
        expected = [r.token_ids for r in serve(engine, JOBS)]
    with make_engine(around(owner, counts), backend="eager") as engine:
        serve(engine, JOBS)
        owner.load_state_dict(other.state_dict(), assign=True)
        engine.recapture()
        assert [r.token_ids for r in serve(engine, JOBS)] == expected


def test_weights_of_a_compiled_model_are_named_as_in_the_model() -> None:
    model, counts = TinyModel(), Backend()
    with make_engine(around(model, counts)) as engine:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        with pytest.raises(graphattn.WeightsMovedError, match=r"^head\.weight: captured"):
            serve(engine, JOBS)


def test_a_report_says_so() -> None:
    model = around(tiny("llama"), Backend())
    assert adapt(model).notes == ("compiled by torch.compile: 1 modules",)  # type: ignore[attr-defined]
    with graphattn.capture(model, 2, max_seq_len=32, max_tokens=8) as engine:
        assert "compiled by torch.compile: 1 modules" in str(engine.report())


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_compiled_models_are_captured_on_a_gpu(mode: str) -> None:
    """Not yet run on a GPU."""
    model = TinyModel(head_dim=64, hidden=48).to("cuda")
    compiled = torch.compile(model, mode=mode)
    with graphattn.capture(compiled, 4, max_tokens=32, page_size=16, num_pages=64) as engine:
        for request, (prompt, count) in zip(serve(engine, JOBS), JOBS, strict=True):
            assert request.token_ids == model.generate(prompt, count)
        assert engine.verify(8).ok
