"""Functions of torch.compile: what backends and audit make of them, and which are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphattn
from graphattn import CaptureError
from graphattn._capture.audit import audit
from graphattn._capture.compiled import (
    compiled_already,
    graphs_of_its_own,
    uncompiled,
    variants,
)
from graphattn._capture.eager import EagerGraph
from graphattn._capture.family import capture_family
from graphattn._capture.host import HostGraph
from graphattn._capture.verify import verify
from graphattn.errors import UnsupportedModelError
from tests.runtime.tiny_model import TinyModel

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Backend:
    """Of torch.compile: counts, and adds a trace to the result that tells it from plain code."""

    def __init__(self) -> None:
        self.compiled = self.runs = 0

    def __call__(self, gm: Any, inputs: list[Tensor]) -> Callable[..., Any]:
        self.compiled += 1

        def run(*args: Tensor) -> tuple[Tensor, ...]:
            self.runs += 1
            return tuple(x + 1000 for x in gm.forward(*args))

        return run


def plainly(x: Tensor) -> Tensor:
    return F.silu(x) * 2 + 1


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("warm", [False, True])
def test_a_host_graph_holds_the_plain_operations(fullgraph: bool, warm: bool) -> None:
    """Generated code is no torch operation: recording it would record nothing."""
    backend, x = Backend(), torch.randn(3, 4)
    fn = torch.compile(plainly, backend=backend, fullgraph=fullgraph)
    if warm:
        fn(x)
    graph = HostGraph("step")
    y = graph.capture(lambda: fn(x))
    x.copy_(torch.randn(3, 4))
    graph.replay()
    assert torch.equal(y, plainly(x))
    assert graph.info.node_count == 3
    assert backend.runs == warm


def test_an_eager_graph_runs_the_compiled_code() -> None:
    backend, x, y = Backend(), torch.randn(3, 4), torch.zeros(3, 4)
    fn = torch.compile(plainly, backend=backend, fullgraph=True)
    graph = EagerGraph("step", device=CPU)
    graph.capture(lambda: y.copy_(fn(x)))
    graph.replay()
    graph.replay()
    assert torch.equal(y, plainly(x) + 1000)
    assert (backend.compiled, backend.runs) == (1, 2)


def test_replay_is_verified_against_what_it_was_recorded_from() -> None:
    backend, x, y = Backend(), torch.randn(3, 4), torch.zeros(3, 4)
    fn = torch.compile(plainly, backend=backend, fullgraph=True)

    def step() -> None:
        y.copy_(fn(x))

    for graph in (HostGraph("host"), EagerGraph("eager", device=CPU)):
        graph.capture(step)
        report = verify(step, graph, inputs=lambda i: None, watch={"x": x, "y": y}, steps=2)
        assert report.ok, str(report)
    with graphattn.Graph(step, device="cpu", backend="host") as public:
        public.run_eagerly()
        eagerly = y.clone()
        public.replay()
        assert torch.equal(y, eagerly)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_an_audit_looks_at_the_plain_operations(fullgraph: bool) -> None:
    x = torch.randn(4)

    def reads(x: Tensor) -> Tensor:
        return x * x.sum().item()

    fine = torch.compile(plainly, backend="eager", fullgraph=fullgraph)
    assert audit(lambda: fine(x)).num_ops == 3
    (finding,) = audit(torch.compile(reads, backend="eager", fullgraph=fullgraph), x).findings
    assert (finding.category, finding.source) == ("host read", "return x * x.sum().item()")


def test_a_capture_does_not_compile() -> None:
    """What the warm-up did not see would be compiled, and tried out, in the middle of a capture."""
    fn = torch.compile(plainly, backend="eager", dynamic=False)
    fn(torch.randn(3))
    with compiled_already():
        fn(torch.randn(3))
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            fn(torch.randn(5))


def test_every_bucket_gets_its_variant() -> None:
    """Beyond its limit torch runs plain code, and only a log tells."""
    for room, plain_runs in ((0, 3), (4, 0)):
        torch._dynamo.reset()
        backend = Backend()
        fn = torch.compile(plainly, backend=backend, dynamic=False)
        with torch._dynamo.config.patch(recompile_limit=1), variants(room):
            for size in range(2, 6):
                fn(torch.randn(size))
        assert (backend.compiled, backend.runs) == (4 - plain_runs, 4 - plain_runs)


REFUSED: list[dict[str, Any]] = [
    {"mode": "reduce-overhead"},
    {"mode": "max-autotune"},
    {"options": {"triton.cudagraphs": True}},
    {"backend": "cudagraphs"},
]
FINE: list[dict[str, Any]] = [
    {},
    {"mode": "max-autotune-no-cudagraphs"},
    {"options": {"triton.cudagraphs": False}},
    {"backend": "aot_eager"},
    {"backend": Backend()},
]


@pytest.mark.parametrize("how", REFUSED, ids=str)
@pytest.mark.parametrize("backend", ["host", "eager"])
def test_what_makes_graphs_of_its_own_is_refused(how: dict[str, Any], backend: Any) -> None:
    x = torch.ones(3)
    program = torch.compile(lambda: x + 1, **how)
    with pytest.raises(CaptureError, match=r"'step': .* make CUDA graphs of its own"):
        capture_family({"step": program}, backend=backend, device=CPU)
    whole, inside, method, held = (TinyModel() for _ in range(4))
    inside.qkv[0] = torch.compile(inside.qkv[0], **how)
    method.out[1].compile(**how)
    held.block = torch.compile(held._split, **how)  # type: ignore[assignment]
    for model, part in (
        (torch.compile(whole, **how), "OptimizedModule"),
        (inside, r"qkv\.0"),
        (method, r"out\.1"),
        (held, "block"),
    ):
        with pytest.raises(UnsupportedModelError, match=rf"model: {part} is compiled .*no-cuda"):
            graphattn.capture(model, 2, backend=backend)


@pytest.mark.parametrize("how", FINE, ids=lambda how: str(list(how.items())[:1])[:40])
def test_what_is_accepted(how: dict[str, Any]) -> None:
    """Looked through, too: the module is the one that was given."""
    x, layer = torch.ones(3), nn.Linear(3, 3)
    assert graphs_of_its_own(torch.compile(plainly, **how)) is None
    assert graphs_of_its_own(torch.compile(layer, **how)) is None
    assert uncompiled(torch.compile(layer, **how)) is layer
    graphs = capture_family(
        {"step": torch.compile(lambda: x + 1, **how)}, backend="host", device=CPU
    )
    assert graphs["step"].info.node_count == 1


@pytest.mark.slow
def test_with_generated_code() -> None:
    """torch's own compiler, C++ on a CPU: replays of the eager backend run it."""
    x, y = torch.randn(33, 65), torch.zeros(33, 65)
    fn = torch.compile(plainly, fullgraph=True)
    for backend in ("host", "eager"):
        with graphattn.Graph(lambda: y.copy_(fn(x)), device="cpu", backend=backend) as graph:
            x.normal_()
            graph.replay()
            # two roundings of values below 10
            torch.testing.assert_close(y, plainly(x), rtol=0, atol=20 * torch.finfo().eps)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_compiled_code_is_captured_on_a_gpu(mode: str) -> None:
    """Not yet run on a GPU."""
    x, y = torch.randn(33, 65, device="cuda"), torch.zeros(33, 65, device="cuda")
    fn = torch.compile(plainly, mode=mode)
    with graphattn.Graph(lambda: y.copy_(fn(x)), device="cuda") as graph:
        x.normal_()
        graph.replay()
        torch.testing.assert_close(y, plainly(x), rtol=0, atol=20 * torch.finfo().eps)
