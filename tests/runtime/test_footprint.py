"""Memory before capture: the prediction is what is allocated, what cannot fit is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from graphattn import MTP, ConfigError, DraftModel, NGram, capture, fitting
from graphattn._capture.allocations import Allocations
from graphattn.dcp import DCP
from graphattn.footprint import predict
from graphattn.groups import VirtualGroup
from graphattn.metadata import HEADER
from graphattn.models.contract import AttentionLayer, StepModel
from graphattn.rehearse import REHEARSAL
from graphattn.runner import Runner
from graphattn.sizing import resolve
from graphattn.stream import HostStream
from tests.runtime.tiny_latent import TinyLatent
from tests.runtime.tiny_model import TinyModel
from tests.runtime.tiny_mtp import KnowingMTP, TinyTarget
from tests.runtime.tiny_recurrent import TinyRecurrent

BOUNDS: dict[str, Any] = {"max_batch": 3, "max_tokens": 19, "page_size": 8, "num_pages": 40}
FP8 = torch.float8_e4m3fn

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "windows": (lambda: TinyModel(windows=(0, 5, 9)), {}),
    "latent": (lambda: TinyLatent(), {}),
    "slot tensors": (lambda: TinyRecurrent(), {}),
    "lookup": (TinyModel, {"speculate": NGram(3)}),
    "draft model": (TinyModel, {"speculate": DraftModel(TinyModel(windows=(4,)), 2)}),
    "dcp": (TinyModel, {"dcp": DCP(VirtualGroup(3), 5), "kv_dtype": FP8}),
    "a2a, draft model": (
        TinyModel,
        {
            "dcp": DCP(VirtualGroup(2), 3, "a2a"),
            "speculate": DraftModel(TinyModel(num_q_heads=2), 2),
        },
    ),
    "run ahead, eager": (TinyModel, {"run_ahead": 4, "backend": "eager"}),
}


def test_mtp_is_predicted() -> None:
    model = TinyTarget()
    check(model, {"speculate": MTP(3, KnowingMTP(model, depth=2))})


@pytest.mark.parametrize("case", CASES, ids=str)
def test_prediction_is_what_is_allocated(case: str) -> None:
    make, options = CASES[case]
    check(make(), options)


def opened(model: StepModel, **options: Any) -> Runner:
    """The memory of an engine, without its graphs."""
    given = {"max_seq_len": 90, "backend": "auto"} | BOUNDS | options
    asked = replace(REHEARSAL, **given)
    config = resolve(asked, model)
    return Runner(model, config, HostStream(), None if config.dcp is None else config.dcp.open())


def check(model: StepModel, options: dict[str, Any]) -> None:
    runner = opened(model, **options)
    measured = runner.measured()
    assert predict(model, runner.config) == replace(measured, graphs=None)
    pools = runner.pools().values()
    assert measured.pages == sum(pool.nbytes for pool in pools)
    scratch = runner.memory.scratch() | (runner.drafter.scratch() if runner.drafter else {})
    for part, kind, header in (("metadata", "step.", HEADER), ("workspaces", "workspace.", 0)):
        assert getattr(measured, part) == sum(
            tensor.nbytes + header * tensor.itemsize
            for name, tensor in scratch.items()
            if kind in name
        ), part
    blocks = (runner.memory.inputs.block, runner.memory.output.block)
    assert measured.blocks == sum(block.nbytes for block in blocks)
    lasting = runner.memory.lasting() | (runner.drafter.lasting() if runner.drafter else {})
    assert measured.state >= sum(tensor.nbytes for tensor in lasting.values())
    assert (measured.messages > 0) == (runner.config.dcp is not None)


def test_what_is_packed_is_predicted_and_measured() -> None:
    """The head is large enough to be packed, and so is the embedding, which no linear uses."""
    model = TinyModel(vocab_size=6000)
    with capture(model, buckets=[3], **BOUNDS) as engine:
        measured = engine._runner.measured()
        predicted = predict(model, engine.config, graphs=True)
    assert predicted.graphs is not None
    assert measured.graphs is not None
    assert min(predicted.graphs, measured.graphs) > 6000 * 4
    assert measured.weight_copies == model.head.weight.nbytes
    assert predicted.weight_copies == model.head.weight.nbytes + model.embed.weight.nbytes
    assert predict(model, opened(model, prepack=False).config).weight_copies == 0


def test_a_step_that_fake_memory_cannot_run_has_no_estimate() -> None:
    class Reads(TinyModel):
        def __call__(self, step: Any) -> Any:
            self.seen = int(step.input_ids.max())
            return super().__call__(step)

    runner = opened(Reads(), backend="eager")
    assert predict(runner._model, runner.config, graphs=True) == runner.measured()


def test_the_estimate_leaves_the_model_alone() -> None:
    """What a model keeps for itself must not become fake."""

    class Keeps(TinyModel):
        calls, last = 0, None

        def __call__(self, step: Any) -> Any:
            self.calls += 1
            self.last = super().__call__(step)
            return self.last

    model = Keeps()
    config = opened(model).config
    assert predict(model, config, graphs=True).graphs
    assert model.calls == 0
    assert model.last is None


def test_what_cannot_fit_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(ConfigError) as refusal:  # more than can be asked of any system
        capture(TinyModel(), **(BOUNDS | {"num_pages": 10**13}))
    text = str(refusal.value)
    assert text.startswith("num_pages, memory_budget: wanted bounds whose memory fits in the ")
    layers = TinyModel().attention_layers
    values = sum(layer.entry_values for layer in layers)
    assert f"bytes: pages {10**13 * 8 * values * 4:,}, workspaces " in text
    for part in ("metadata", "state", "blocks", "rings", "graphs"):
        assert f", {part} " in text


def test_pages_that_nobody_asked_for_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are committed as they are written; the other parts must fit all the same."""
    model = TinyModel()
    config = opened(model).config
    known = predict(model, config, graphs=True)
    rest = sum(size or 0 for size in known.sizes().values()) - known.pages
    monkeypatch.setattr(fitting, "free_bytes", lambda device: rest)
    fitting.check_fits(model, config, pages_asked_for=False)
    with pytest.raises(ConfigError, match=r"^num_pages, memory_budget: .*pages"):
        fitting.check_fits(model, config, pages_asked_for=True)
    monkeypatch.setattr(fitting, "free_bytes", lambda device: rest - 1)
    with pytest.raises(ConfigError, match=r"^max_batch, max_seq_len, max_tokens: ") as refusal:
        fitting.check_fits(model, config, pages_asked_for=False)
    assert "pages" not in str(refusal.value)


def test_memory_that_is_free_is_read_from_the_system(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:       7 kB\n")
    monkeypatch.setattr(fitting, "MEMINFO", meminfo)
    assert fitting.free_bytes(cpu) == 7 * 1024
    meminfo.unlink()
    assert fitting.free_bytes(cpu) is None
    model = TinyModel()
    config = resolve(replace(REHEARSAL, num_pages=10**13), model)
    fitting.check_fits(model, config, pages_asked_for=True)  # nothing is known, nothing refused


def test_peak_and_what_stays_are_counted_by_owner() -> None:
    owner = ["first"]
    given = torch.zeros(100)
    with Allocations(lambda: owner[0]) as counted:
        given.add_(1)
        view = given[:10]
        kept = torch.zeros(10) + torch.zeros(10)  # 3 at one time, one stays
        owner[0] = "second"
        other = kept.double()
        other.t_() if other.dim() == 2 else other.mul_(2)
    assert counted.kept() == {"first": 40, "second": 80}
    assert counted.peak_bytes == 120
    del view, other
    assert counted.kept() == {"first": 40}


def test_windows_of_one_size_share_their_metadata() -> None:
    """So that the exactness above is not that of a constant: bounds move what is predicted."""

    def size(windows: tuple[int, ...], **bounds: Any) -> Any:
        return opened(TinyModel(windows=windows), **bounds).measured()

    small, same, more = size((0, 5)), size((5, 5)), size((0, 5), num_pages=41)
    assert same.metadata < small.metadata
    assert more.pages - small.pages == 2 * AttentionLayer(6, 2, 8, scale=1.0).entry_values * 8 * 4
    assert more.metadata == small.metadata
