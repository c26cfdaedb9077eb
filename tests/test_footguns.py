"""One test for each section of docs/footguns.md, of the same name."""

import gc
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import graphattn
from graphattn import CaptureError, FinishReason, Graph, audit, verify
from graphattn.testing import poison
from tests.runtime.serving import make_engine
from tests.runtime.tiny_model import TinyModel

DOC = Path(__file__).parents[1] / "docs" / "footguns.md"
needs_cuda_build = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="needs a CUDA build of torch (no GPU, no driver)"
)


def test_every_section_has_its_test() -> None:
    sections = re.findall(r"^## (.*)$", DOC.read_text(), re.MULTILINE)
    names = {"test_" + re.sub(r"\W+", "_", section.lower()) for section in sections}
    tests = {n for n in dir(sys.modules[__name__]) if n.startswith("test_")}
    assert tests - {"test_every_section_has_its_test"} == names


class Host:
    """What a program keeps in Python."""

    scale, calls = 2.0, 0

    def __init__(self) -> None:
        self.x, self.out = torch.ones(3), torch.zeros(3)

    def double(self) -> None:
        self.calls += 1
        self.out.copy_(self.x * self.scale)

    def branch(self) -> None:
        self.out.copy_(self.x + 1 if self.scale > 2 else self.x - 1)

    def advance(self) -> None:
        self.scale += 1


@needs_cuda_build
def test_a_number_read_while_capturing_is_frozen() -> None:
    host = Host()
    with Graph(host.double, device="cpu") as graph:
        host.advance()
        graph.replay()
    assert host.out.tolist() == [2.0] * 3
    (finding,) = audit(host.double, advance=host.advance).findings
    assert "was given 3.0 in one run and 4.0 in the next" in finding.reason
    assert finding.source == "self.out.copy_(self.x * self.scale)"


@needs_cuda_build
def test_a_branch_taken_while_capturing_is_taken_for_ever() -> None:
    host = Host()
    with Graph(host.branch, device="cpu") as graph:
        host.advance()
        graph.replay()
    assert host.out.tolist() == [0.0] * 3
    host.scale = 2.0
    (finding,) = audit(host.branch, advance=host.advance).findings
    assert finding.category == "frozen host value"


def test_a_print_a_counter_a_hook_runs_once() -> None:
    host = Host()
    with Graph(host.double, device="cpu") as graph:
        calls = host.calls
        for _ in range(5):
            graph.replay()
    assert host.calls == calls
    with make_engine(TinyModel()) as engine:
        engine.generate([[1, 2]], max_new_tokens=5)
        stats = engine.stats()
    assert stats.steps == stats.graph_hits >= 5


def test_an_assertion_no_longer_asserts() -> None:
    def program() -> None:
        assert x.max() < 5

    x = torch.ones(3)
    with pytest.raises(CaptureError, match=r"assert x\.max\(\) < 5"):
        Graph(program, device="cpu")
    model = TinyModel()
    with make_engine(model) as engine, torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
        (done,) = engine.generate([[1, 2]], max_new_tokens=5)
    assert done.finish_reason is FinishReason.ERROR


@needs_cuda_build
def test_a_tensor_made_anew_is_not_seen() -> None:
    host = Host()

    def renew() -> None:
        host.x = torch.full((3,), 7.0)

    (finding,) = audit(host.double, advance=renew).findings
    assert finding.category == "other tensor"
    with Graph(host.double, device="cpu") as graph:
        state = vars(host)
        watch = {"x": state["x"], "out": state["out"]}

        def inputs(step: int) -> None:
            watch["out"] = state["out"] = state["out"].clone() if step else state["out"]

        report = verify(graph, inputs=inputs, watch=watch, steps=3)
    assert report.moved == ("out",)


def test_an_exchanged_weight_is_not_seen() -> None:
    model, other = TinyModel(), TinyModel(seed=9)
    with make_engine(model) as engine:
        engine.generate([[1, 2]], max_new_tokens=3)
        model.load_state_dict(other.state_dict(), assign=True)
        engine.submit([1, 2], max_new_tokens=6)
        with pytest.raises(graphattn.WeightsMovedError, match="recapture"):
            engine.step()
        engine.recapture()
        while engine.busy:
            engine.step()
        (event,) = [e for e in engine.poll() if e.finished]
    assert event.request.token_ids == other.generate([1, 2], 6)


def test_an_output_is_overwritten_by_the_next_replay() -> None:
    x = torch.zeros(3)
    with Graph(lambda: x + 1, device="cpu") as graph:
        graph.replay()
        first = graph.outputs
        kept = first.clone()
        x.fill_(5)
        graph.replay()
        assert graph.outputs is first
    assert (first.tolist(), kept.tolist()) == ([6.0] * 3, [1.0] * 3)


@needs_cuda_build
def test_a_slice_of_a_growing_length_keeps_its_length() -> None:
    cache, length = torch.ones(8), [2]

    def program() -> Tensor:
        return cache[: length[0]].sum()

    with Graph(program, device="cpu") as graph:
        length[0] = 5
        graph.replay()
        assert graph.outputs.item() == 2.0
    (finding,) = audit(program, advance=lambda: length.append(length.pop() + 1)).findings
    assert finding.source == "return cache[: length[0]].sum()"


@needs_cuda_build
def test_random_numbers_of_another_generator_repeat() -> None:
    own = torch.Generator()
    (finding,) = audit(lambda: torch.rand(3, device="cuda", generator=own)).findings
    assert finding.category == "random state"
    with Graph(lambda: torch.rand(3), device="cpu") as graph:
        graph.replay()
        first = graph.outputs.clone()
        graph.replay()
        assert not torch.equal(first, graph.outputs)


def test_padding_rows_read_and_write_like_others() -> None:
    with make_engine(TinyModel(), max_batch=4, prefix_reuse=False) as engine:
        for pool in engine.pools().values():
            poison(pool)
        (done,) = engine.generate([[1, 2, 3]], max_new_tokens=9)
        written = {n: int((~p.isnan()).any(-1).any(1).sum()) for n, p in engine.pools().items()}
    assert list(done.token_ids) == TinyModel().generate([1, 2, 3], 9)
    assert set(written.values()) == {3 + 9 - 1}  # the entries of one request, and no other


def test_a_nan_in_a_page_that_nobody_reads_any_more_still_hurts() -> None:
    assert (torch.tensor([0.0, 1.0]) @ torch.tensor([float("nan"), 1.0])).isnan()
    with make_engine(TinyModel(), max_batch=2, prefix_reuse=False) as engine:
        engine.generate([[5] * 30] * 2, max_new_tokens=9)
        for pool in engine.pools().values():
            poison(pool)
        (done,) = engine.generate([[1, 2, 3]], max_new_tokens=9)
    assert list(done.token_ids) == TinyModel().generate([1, 2, 3], 9)


def test_warming_up_leaves_traces() -> None:
    counter = torch.zeros(1)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with Graph(lambda: counter.add_(torch.rand(1) + 1), device="cpu"):
        assert counter.item() == 0.0
        assert torch.equal(torch.get_rng_state(), before)


def test_a_replay_is_not_eager_where_weights_are_packed() -> None:
    with (
        make_engine(TinyModel(), prepack=True) as engine,
        pytest.raises(graphattn.ConfigError, match="without prepacked linears"),
    ):
        engine.verify(2)


@needs_cuda_build
def test_a_copy_from_the_host_inside_the_program_reads_the_host_when_it_runs() -> None:
    x = torch.zeros(3)
    (finding,) = audit(lambda: x.copy_(torch.zeros(3))).findings
    assert finding.category == "host-to-device copy"
    with make_engine(TinyModel()) as engine:
        assert engine.audit().ok


def test_the_shape_of_the_capture_is_the_only_shape() -> None:
    with make_engine(TinyModel(), max_batch=5) as engine:
        engine.generate([[i + 1] * (3 * i + 1) for i in range(7)], max_new_tokens=6)
        assert engine.stats().fallbacks == 0
        assert {b.replays > 0 for b in engine.report().buckets} == {True, False}


def test_a_failed_capture_leaves_the_process_changed() -> None:
    counter, x = torch.zeros(1), torch.ones(3)

    def program() -> None:
        counter.add_(torch.rand(1))
        x.sum().item()

    before = torch.get_rng_state()
    with pytest.raises(CaptureError, match=r"program 'program': (.|\n)*x\.sum\(\)\.item\(\)"):
        Graph(program, device="cpu")
    assert counter.item() == 0.0
    assert torch.equal(torch.get_rng_state(), before)
    assert gc.isenabled()
