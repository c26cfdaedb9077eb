"""Kernels of others in an engine: same tokens, clean audits, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from graphattn import DCP, ConfigError, NGram, UnsupportedModelError, VirtualGroup
from graphattn.foreign import Capabilities, ForeignAttention
from graphattn.foreign.flex import Flex
from graphattn.foreign.sdpa import SDPA
from tests.runtime import foreign_kernels as kernels
from tests.runtime.foreign_kernels import EVERYTHING, Right
from tests.runtime.serving import make_engine, prompts, serve
from tests.runtime.tiny_latent import TinyLatent
from tests.runtime.tiny_model import TinyModel

JOBS = [(p, 1 + 5 * i % 13) for i, p in enumerate(prompts(6, seed=8, longest=30))]
REPEATING = [([4, 5, 6] * 5, 9), ([7] * 8, 7)]
FOREIGN = replace(EVERYTHING, exact_empty=False, lse="base 2")


def virtual(W: int, I: int = 1, reduce: str = "ag_rs") -> DCP:
    return DCP(VirtualGroup(W), I, reduce)  # type: ignore[arg-type]


def check_tokens(model: TinyModel, jobs: list[Any], **options: Any) -> None:
    with make_engine(model, **options) as engine:
        tokens = [request.token_ids for request in serve(engine, jobs)]
        assert tokens == [model.generate(p, n) for p, n in jobs]
        assert engine.stats().fallbacks == 0


@pytest.mark.parametrize("backend", ["host", "eager"])
def test_sdpa_gives_the_tokens(backend: str) -> None:
    check_tokens(TinyModel(), JOBS, attention=SDPA(), backend=backend)


def test_sdpa_with_drafts() -> None:
    check_tokens(TinyModel(), REPEATING + JOBS[:2], attention=SDPA(), speculate=NGram(3))


def test_sdpa_over_latents() -> None:
    check_tokens(TinyLatent(), JOBS[:3], attention=SDPA())


@pytest.mark.slow
def test_flex_with_everything_that_it_claims() -> None:
    model = TinyModel(softcap=2.0, sinks=True)
    check_tokens(model, JOBS[:2], attention=Flex())


def test_flex_over_ranks_with_drafts() -> None:
    options = {"dcp": virtual(2, 3), "speculate": NGram(2), "attention": Flex()}
    check_tokens(TinyModel(windows=(5,), sinks=True), [([4, 5, 6] * 3, 5)], **options)


@pytest.mark.parametrize(("W", "reduce"), [(2, "a2a"), (4, "ag_rs")])
def test_base_2_and_plus_infinity_over_ranks(W: int, reduce: str) -> None:
    """Shards that show nothing come with an LSE of +inf and NaN for an output."""
    model, kernel = TinyModel(softcap=2.0, sinks=True), kernels.Base2PlusInf(FOREIGN)
    check_tokens(model, JOBS[:3], attention=kernel, dcp=virtual(W, 3, reduce), speculate=NGram(2))


def test_a_decode_kernel_beside_ours() -> None:
    """It attends in pure decode steps; those with prefill rows are ours."""
    kernel = kernels.DecodeOnly(replace(EVERYTHING, max_query_len=1, prefill=False))
    check_tokens(TinyModel(), JOBS, attention=kernel)
    with make_engine(TinyModel(), attention=kernel) as engine:
        assert "by DecodeOnly; steps with prefill rows by our kernels" in str(engine.report())


@pytest.mark.parametrize("kernel", [SDPA(), Flex()], ids=lambda kernel: type(kernel).__name__)
def test_replay_verifies_and_audits_clean(kernel: ForeignAttention) -> None:
    with make_engine(TinyModel(windows=(5,)), attention=kernel, max_batch=2) as engine:
        report = engine.verify(4)
        assert report.ok, str(report)
        assert engine.audit().findings == ()


@pytest.mark.parametrize(
    ("kernel", "options", "message"),
    [
        (
            Right(replace(EVERYTHING, host_plan=True)),
            {},
            "Right plans on the host in every step.*backend='eager'",
        ),
        (
            Right(replace(EVERYTHING, max_query_len=2)),
            {"speculate": NGram(2)},
            "at most 2 places of a decode row, and 2 drafts need 3. Pass speculate with k <= 1",
        ),
        (SDPA(), {"dcp": virtual(2)}, "SDPA returns no LSE"),
        (
            Right(replace(EVERYTHING, shards=False)),
            {"dcp": virtual(2)},
            "causal ranges only, and those of a DCP rank are not",
        ),
        (SDPA, {}, "wanted a graphattn.foreign.ForeignAttention.*got 'ABCMeta'"),
    ],
)
def test_what_a_kernel_cannot_do_is_refused(
    kernel: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^attention: .*{message}"):
        make_engine(TinyModel(), attention=kernel, **options)


@pytest.mark.parametrize(
    ("model", "field", "message"),
    [
        (TinyModel(), "windows", r"layer 1: Right does not support a sliding window \(5\)"),
        (TinyModel(softcap=2.0), "softcap", r"layer 0: Right does not support a soft-cap \(2.0\)"),
        (TinyModel(sinks=True), "sinks", "layer 0: Right does not support attention sinks"),
        (TinyLatent(), "latent", "layer 0: Right does not support latent attention"),
    ],
)
def test_options_of_layers_that_a_kernel_lacks(model: TinyModel, field: str, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        make_engine(model, attention=Right(replace(EVERYTHING, **{field: False})))


def test_sinks_of_ranks_are_ours() -> None:
    """They join the union over the ranks, so a kernel without them serves a group."""
    kernel = Right(replace(EVERYTHING, sinks=False))
    check_tokens(TinyModel(sinks=True), JOBS[:3], attention=kernel, dcp=virtual(2))


def test_a_host_plan_runs_eagerly() -> None:
    kernel = kernels.ReadsLengths(replace(EVERYTHING, host_plan=True))
    check_tokens(TinyModel(), JOBS[:3], attention=kernel, backend="eager")


def test_pages_of_another_dtype_are_refused_by_the_adapter() -> None:
    with pytest.raises(UnsupportedModelError, match="SDPA does not support FP8 pages"):
        make_engine(TinyModel(), attention=SDPA(), kv_dtype=torch.float8_e4m3fn)


def test_a_kernel_that_claims_little_serves_a_plain_model() -> None:
    kernel = Right(Capabilities(exact_empty=True, max_query_len=1))
    check_tokens(TinyModel(windows=(0, 0)), JOBS[:3], attention=kernel)
