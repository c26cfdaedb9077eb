"""The conformance test of kernels of others: who passes it, and what it catches."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from graphattn import ConfigError
from graphattn.foreign import Capabilities, ForeignAttention, conformance
from graphattn.foreign.calling import attend_by
from graphattn.foreign.conformance import ConformanceError, Geometry, Scenario
from graphattn.foreign.flex import Flex
from graphattn.foreign.sdpa import SDPA
from graphattn.models.contract import AttentionLayer
from tests.kernels import attend_case
from tests.kernels.attend_case import Row, Setting
from tests.runtime import foreign_kernels as kernels
from tests.runtime.foreign_kernels import EVERYTHING, Right
from tests.runtime.op_case import attend_args


def is_telling(scenario: Scenario) -> bool:
    """Of those that one adapter may pass and another not."""
    return not scenario.latent and scenario.shard in ((1, 0, 1), (2, 1, 1))


CASES = [
    pytest.param(
        kernel,
        scenario,
        id=f"{type(kernel).__name__} {scenario}",
        # Flex takes a second for each.
        marks=[pytest.mark.slow] * (type(kernel) is Flex and not is_telling(scenario)),
    )
    for kernel in (SDPA(), Flex())
    for scenario in conformance.scenarios(kernel)
]


@pytest.mark.parametrize(("kernel", "scenario"), CASES)
def test_adapters_conform(kernel: ForeignAttention, scenario: Scenario) -> None:
    conformance.check(kernel, scenario)


@pytest.mark.parametrize("kernel", [SDPA(), Flex()], ids=lambda kernel: type(kernel).__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.slow
def test_adapters_conform_in_narrow_dtypes(kernel: ForeignAttention, dtype: torch.dtype) -> None:
    conformance.conform(kernel, Geometry(dtype=dtype, page_size=5, num_kv_heads=6))


SMALL = Geometry(num_q_heads=2, num_kv_heads=1, head_dim=8, value_dim=6)

HEADS = replace(EVERYTHING, latent=False)
NOT_EXACT = replace(HEADS, exact_empty=False)
HONEST = [
    Right(),
    kernels.Base2(replace(HEADS, lse="base 2")),
    kernels.PlusInf(NOT_EXACT),
    kernels.Nan(NOT_EXACT),
    kernels.LeavesEmpty(NOT_EXACT),
    kernels.NoLSE(replace(HEADS, lse="none")),
    kernels.NoWindow(replace(HEADS, windows=False, shards=False)),
    kernels.ReadsLengths(replace(HEADS, host_plan=True)),
]


@pytest.mark.parametrize("kernel", HONEST, ids=lambda kernel: type(kernel).__name__)
def test_kernels_that_claim_what_they_do_conform(kernel: ForeignAttention) -> None:
    conformance.conform(kernel, SMALL)


DISHONEST: dict[ForeignAttention, str] = {
    kernels.Base2(): "decode: the LSE is of another base; claim lse='base 2'",
    Right(replace(EVERYTHING, lse="base 2")): "decode: the LSE is of another base; claim "
    "lse='natural'",
    kernels.PlusInf(): "places past the last row: writes an LSE of +inf for tokens that see "
    "nothing; claim exact_empty=False",
    kernels.Nan(): "places past the last row: writes NaN for tokens that see nothing",
    kernels.LeavesEmpty(): "places past the last row: leaves token places that see nothing "
    "unwritten; claim exact_empty=False",
    kernels.OtherZero(): "places past the last row: writes neither 0 nor an LSE of -inf",
    kernels.LeavesRow(): "decode: out is not written at token places that see something",
    kernels.NoLSE(): "decode: the LSE is not written at token places that see something; claim "
    "lse='none'",
    kernels.WholePages(): "decode: depends on KV entries that no token sees",
    kernels.WholeTable(): "decode: reads page-table entries of columns that no token sees: index",
    kernels.CleansPages(): "decode: writes into pool 0, an input",
    kernels.ScalesQueries(): "decode: writes into q, an input",
    kernels.Inaccurate(): "decode: out is off by ",
    kernels.NoWindow(): "a window: ",
    kernels.EndsAtTheRow(): "fewer drafts than places: ",
    kernels.ReadsLengths(): "a replay with other contents: cannot be captured: ",
}


@pytest.mark.parametrize(
    ("kernel", "message"),
    DISHONEST.items(),
    ids=lambda x: type(x).__name__ if isinstance(x, ForeignAttention) else "",
)
def test_each_misbehaviour_has_its_message(kernel: ForeignAttention, message: str) -> None:
    with pytest.raises(ConformanceError, match=f"^{re.escape(message)}"):
        conformance.conform(kernel, SMALL)


def test_a_plan_that_freezes_is_caught() -> None:
    """Right in every eager step; the plan of the capture stays."""
    (scenario,) = (s for s in conformance.scenarios(Right()) if s.replayed)
    with pytest.raises(ConformanceError, match=r"results of earlier contents.*host_plan=True"):
        conformance.check(kernels.PlansOnce(), scenario)


def test_a_causal_staircase_is_none_on_a_rank() -> None:
    staircase = kernels.EndsAtTheRow()
    ranks = [s for s in conformance.scenarios(staircase) if s.shard in ((2, 0, 1), (2, 1, 1))]
    assert len(ranks) == 4
    for scenario in ranks:
        with pytest.raises(ConformanceError, match=f"^{scenario}: "):
            conformance.check(staircase, scenario, SMALL)


def test_a_kernel_is_asked_only_for_what_it_claims() -> None:
    names = {str(s) for s in conformance.scenarios(Right(Capabilities()))}
    assert {"decode", "rows that see nothing", "drafts", "mixed", "chunks"} <= names
    assert not {n for n in names if n.startswith(("a window", "rank", "latent", "sinks"))}
    decode_only = Right(Capabilities(max_query_len=1, prefill=False, host_plan=True, shards=True))
    for scenario in conformance.scenarios(decode_only):
        assert all(row.places == 1 and not row.prefill for row in scenario.rows)
        assert not scenario.replayed
    conformance.conform(
        kernels.DecodeOnly(replace(EVERYTHING, max_query_len=1, prefill=False)), SMALL
    )


NORMALISED = [
    kernels.Base2PlusInf(replace(NOT_EXACT, lse="base 2")),
    kernels.Nan(NOT_EXACT),
    kernels.LeavesEmpty(NOT_EXACT),
]


@pytest.mark.parametrize("kernel", NORMALISED, ids=lambda kernel: type(kernel).__name__)
def test_what_others_write_becomes_ours(kernel: ForeignAttention) -> None:
    """Lengths [0, 2] with queries [1, 4] and 2 padded places: an LSE left unwritten, +inf or NaN
    for the empty ones was merged into NaN elsewhere. Outputs start as NaN here."""
    setting = Setting(device="cpu", decode_query_len=4, tail=2)
    case = attend_case.build([Row(0, 1, tokens=0), Row(2, 4), Row(0, 4, tokens=1)], setting)
    args = attend_args(case)
    layer = AttentionLayer(setting.heads, setting.kv_heads, setting.dim, args["scale"])
    pools = args["k_pool"], args["v_pool"]
    attend_by(kernel, args["q"], *pools, args["work"], layer, args["out"], args["lse"])
    attend_case.check(case)


def test_nan_of_a_request_is_not_mapped_away() -> None:
    setting = Setting(device="cpu")
    case = attend_case.build([Row(3), Row(5)], setting)
    args = attend_args(case)
    args["q"][1] = torch.nan
    layer = AttentionLayer(setting.heads, setting.kv_heads, setting.dim, args["scale"])
    pools = args["k_pool"], args["v_pool"]
    kernel = kernels.Nan(NOT_EXACT)
    attend_by(kernel, args["q"], *pools, args["work"], layer, args["out"], args["lse"])
    assert args["out"][1].isnan().all()
    assert args["lse"][1].isnan().all()
    assert args["out"][0].isfinite().all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lse": "2"}, "^lse: wanted 'natural' or 'base 2' or 'none', got '2'"),
        ({"max_query_len": 0}, "^max_query_len: wanted an integer >= 1"),
    ],
)
def test_wrong_capabilities(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Capabilities(**fields)  # type: ignore[arg-type]
