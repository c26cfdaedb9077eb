"""A test of attention kernels of others: whether one meets the contract and does what it claims.

    import pytest
    from graphattn.foreign import conformance

    @pytest.mark.parametrize("scenario", conformance.scenarios(kernel), ids=str)
    def test_kernel(scenario):
        conformance.check(kernel, scenario)

Each scenario is a step of the runtime's own metadata. Its results are compared with float64, then
computed again with NaN in every KV entry, and with ids of no page in every page-table entry, that
no token sees. A `ConformanceError` says what is wrong and, where one would help, which capability
to claim instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from graphattn._capture.errors import CaptureError
from graphattn._capture.host import HostGraph
from graphattn.foreign.conformance_step import Geometry, Hazard, Row, Scenario, Step, build
from graphattn.foreign.contract import ForeignAttention

__all__ = ["ConformanceError", "Geometry", "Scenario", "check", "conform", "scenarios"]

UNWRITTEN = 777.0  # in outputs before the call; no result of a scenario comes near

DECODE = (Row(20), Row(7), Row(1), Row(33))
DRAFTS = (Row(20, 3), Row(5, 3), Row(33, 3))
FEWER_DRAFTS = (Row(20, 3, tokens=1), Row(9, 3, tokens=2), Row(33, 3))
EMPTY = (Row(20), Row(4, tokens=0), Row(padding=True), Row(0), Row(9, tokens=0))
MIXED = (Row(20), Row(8, 5, prefill=True), Row(4), Row(0, 9, prefill=True))
CHUNKED = (Row(30, 6, prefill=True), Row(11), Row(0, 1, prefill=True))


class ConformanceError(AssertionError):
    """A kernel does not meet the contract, or claims what it does not do."""


def scenarios(kernel: ForeignAttention) -> list[Scenario]:
    """Those that apply to what the kernel claims."""
    can = kernel.capabilities
    drafts = can.max_query_len is None or can.max_query_len >= 3
    found = [
        Scenario("decode", DECODE),
        Scenario("places past the last row", DECODE, tail=3),
        Scenario("rows that see nothing", EMPTY, tail=2),
    ]
    if drafts:
        found += [
            Scenario("drafts", DRAFTS, drafts=2),
            Scenario("fewer drafts than places", FEWER_DRAFTS, drafts=2, tail=1),
        ]
    if can.prefill:
        found += [Scenario("mixed", MIXED, tail=2), Scenario("chunks", CHUNKED)]
    longest = MIXED if can.prefill else DRAFTS if drafts else DECODE
    options = replace(Scenario("", longest, tail=2), drafts=2 if longest is DRAFTS else 0)
    if can.windows:
        found.append(replace(options, name="a window", window=6))
    if can.softcap:
        found.append(replace(options, name="a soft-cap", softcap=1.5))
    if can.sinks:
        found.append(replace(options, name="sinks", sinks=True))
    if can.shards:
        ranks = [(2, 0, 1), (2, 1, 1), (3, 2, 2), (4, 3, 16)]
        found += [
            replace(options, name=f"rank {r} of {W}, interleave {I}", shard=(W, r, I))
            for W, r, I in ranks
        ]
    if can.latent:
        found += [
            replace(scenario, name=f"latent: {scenario.name}", latent=True)
            for scenario in tuple(found)
            if not scenario.softcap and not scenario.sinks
        ]
    if not can.host_plan:
        found.append(Scenario("a replay with other contents", DECODE, tail=1, replayed=True))
    return found


def conform(kernel: ForeignAttention, geometry: Geometry | None = None) -> None:
    """Check every scenario; the first failure raises."""
    for scenario in scenarios(kernel):
        check(kernel, scenario, geometry)


def check(kernel: ForeignAttention, scenario: Scenario, geometry: Geometry | None = None) -> None:
    """Raise `ConformanceError` when the kernel fails a scenario. Default: CPU, fp32, small."""
    geometry = geometry or Geometry()
    step = build(scenario, geometry)
    _run(kernel, step)
    for problem in _problems(kernel, step):
        raise ConformanceError(f"{scenario}: {problem}")
    if scenario.replayed:
        _check_replay(kernel, step, build(scenario.later(), geometry))
        return
    hazards: tuple[tuple[Hazard, str], ...] = (
        ("table", "reads page-table entries of columns that no token sees"),
        ("entries", "depends on KV entries that no token sees (NaN was planted there)"),
    )
    for hazard, what in hazards:
        spoiled = build(scenario, geometry, hazard)
        try:
            _run(kernel, spoiled)
        except (IndexError, RuntimeError) as error:
            raise ConformanceError(f"{scenario}: {what}: {error}") from error
        if not _same(kernel, step, spoiled):
            raise ConformanceError(f"{scenario}: {what}")


def _run(kernel: ForeignAttention, step: Step) -> None:
    """One call; inputs must come back as they were."""
    before = {name: tensor.clone() for name, tensor in step.inputs().items()}
    step.out.fill_(UNWRITTEN)
    step.lse.fill_(UNWRITTEN)
    _call(kernel, step)
    for name, tensor in step.inputs().items():
        if not torch.equal(_bits(tensor), _bits(before[name])):
            raise ConformanceError(f"{step.scenario}: writes into {name}, an input")


def _call(kernel: ForeignAttention, step: Step) -> None:
    rest = (step.work, step.layer, step.out, step.lse)
    with torch.no_grad():
        if step.scenario.latent:
            kernel.attend_latent(step.q, step.pools[0], *rest)
        else:
            kernel.attend(step.q, step.pools[0], step.pools[1], *rest)


def _problems(kernel: ForeignAttention, step: Step) -> Iterator[str]:
    """What is wrong with the results of a step without hazards, first things first."""
    can, writes_lse = kernel.capabilities, kernel.capabilities.lse != "none"
    wanted, wanted_lse = step.oracle()
    out, lse = step.out.double().cpu(), step.lse.double().cpu()
    empty = step.empty()
    checks_empty_lse = writes_lse and step.layer.sinks is None  # nobody reads it beside sinks
    if can.exact_empty:
        yield from _empty_problems(out[empty], lse[empty] if checks_empty_lse else None)
    out, lse, wanted, wanted_lse = (x[~empty] for x in (out, lse, wanted, wanted_lse))
    if (out == UNWRITTEN).any():
        yield "out is not written at token places that see something"
    if writes_lse and (lse == UNWRITTEN).any():
        yield "the LSE is not written at token places that see something; claim lse='none'"
    budget = step.budget()
    if writes_lse:
        yield from _lse_problems(can.lse, lse, wanted_lse, budget.lse)
    error = _excess(out, wanted, budget.out + budget.out_relative * wanted.abs())
    if error is not None:
        yield f"out is off by {error:.3g} where {budget.out:.3g} is allowed"


def _empty_problems(out: Tensor, lse: Tensor | None) -> Iterator[str]:
    """Of tokens that see nothing, where the kernel claims to write 0 and -inf for them."""
    instead = "; claim exact_empty=False"
    if (out == UNWRITTEN).any() or (lse is not None and (lse == UNWRITTEN).any()):
        yield f"leaves token places that see nothing unwritten{instead}"
    if lse is not None and (lse == math.inf).any():
        yield f"writes an LSE of +inf for tokens that see nothing{instead}"
    if out.isnan().any() or (lse is not None and lse.isnan().any()):
        yield f"writes NaN for tokens that see nothing{instead}"
    if (out != 0).any() or (lse is not None and (lse != -math.inf).any()):
        yield f"writes neither 0 nor an LSE of -inf for tokens that see nothing{instead}"


def _lse_problems(claimed: str, lse: Tensor, natural: Tensor, budget: float) -> Iterator[str]:
    wanted = {"natural": natural, "base 2": natural / math.log(2)}
    error = _excess(lse, wanted[claimed], torch.full_like(natural, 2 * budget))
    if error is None:
        return
    for name, other in wanted.items():
        if name != claimed and _excess(lse, other, torch.full_like(natural, 2 * budget)) is None:
            yield f"the LSE is of another base; claim lse={name!r}"
    yield f"the LSE is off by {error:.3g} where {2 * budget:.3g} is allowed"


def _excess(got: Tensor, wanted: Tensor, allowed: Tensor) -> float | None:
    """Largest error if one is beyond what is allowed; NaN is."""
    error = (got - wanted).abs()
    within = error <= allowed
    return None if bool(within.all()) else float(error.nan_to_num(nan=math.inf).max())


def _same(kernel: ForeignAttention, step: Step, spoiled: Step) -> bool:
    """Whether what others see in the results is the same, bit for bit."""
    rows = torch.ones_like(step.empty()) if kernel.capabilities.exact_empty else ~step.empty()
    pairs = [(step.out, spoiled.out)]
    if kernel.capabilities.lse != "none" and step.layer.sinks is None:
        pairs.append((step.lse, spoiled.lse))
    return all(torch.equal(_bits(a.cpu()[rows]), _bits(b.cpu()[rows])) for a, b in pairs)


def _check_replay(kernel: ForeignAttention, step: Step, later: Step) -> None:
    """Captured over a step's memory, replayed with the contents of another.

    The host's recorder stands for a graph on a CPU; on another device the call is only run again.
    """
    again: Callable[[], None] = partial(_call, kernel, step)
    if step.q.device.type == "cpu":
        graph = HostGraph(str(step.scenario))
        try:
            graph.capture(again)
        except CaptureError as error:
            raise ConformanceError(f"{step.scenario}: cannot be captured: {error}") from error
        again = graph.replay
    for name, tensor in step.inputs().items():
        tensor.copy_(later.inputs()[name])
    step.out.fill_(UNWRITTEN)
    step.lse.fill_(UNWRITTEN)
    again()
    for problem in _problems(kernel, step):
        raise ConformanceError(
            f"{step.scenario}: gives results of earlier contents: what the kernel derived from "
            f"metadata on the host is frozen; claim host_plan=True ({problem})"
        )


def _bits(tensor: Tensor) -> Tensor:
    """For comparisons in which NaN equals itself."""
    return tensor.contiguous().view(torch.uint8)
