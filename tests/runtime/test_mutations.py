"""Faults planted in our own step, and which of our tools catches each.

`verify` compares a replay with eager, `audit` runs the step on a fake device, `debug` captures an
engine in debug mode, and the tokens are those of a sound engine. What replay and eager share, only
the tokens can show, and, where attention reads what the step did not derive, debug mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from graphattn import DCP, CaptureError, GraphAttnError, NGram, VirtualGroup
from graphattn.attention import Attention
from graphattn.engine import Engine
from graphattn.kernels import ops
from graphattn.metadata import StepMetadata
from graphattn.runner import Runner
from graphattn.sample import Sampler
from graphattn.work import AttentionWork
from tests.runtime.serving import make_engine
from tests.runtime.tiny_model import TinyModel

Tensors = dict[str, Any]
Patch = pytest.MonkeyPatch
Fault = Callable[[Callable[..., None], Tensors], None]

STEPS = 10  # to verify
PROMPTS = [[i + 1, 2, 3, i + 1] * (1 + 2 * i % 5) for i in range(6)]
COUNTS = [23, 6, 7, 8, 9, 10]  # the first outlives the others: its steps have padding

ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "drafts": {"speculate": NGram(3), "max_tokens": 20},
    "ag_rs": {"dcp": DCP(VirtualGroup(2), 3)},
    "a2a": {"dcp": DCP(VirtualGroup(2), 3, "a2a")},
}


def model_of(kind: str) -> TinyModel:
    """What is wrong early in a prompt shows in the second layer only."""
    return TinyModel(windows=(0, 0) if "dcp" in ENGINES[kind] else (0,))


def engine_of(kind: str, **options: Any) -> Engine:
    return make_engine(model_of(kind), **ENGINES[kind], **options)


def tokens_of(engine: Engine) -> list[list[int]]:
    """Greedy and sampled requests, more than there are slots, with drafts that are often wrong."""
    requests = [
        engine.submit(prompt, max_new_tokens=COUNTS[i], temperature=0.8 * (i % 2), seed=i)
        for i, prompt in enumerate(PROMPTS)
    ]
    while engine.busy:
        engine.step()
        engine.poll()
    return [request.token_ids for request in requests]


@pytest.fixture(scope="module")
def sound() -> dict[str, list[list[int]]]:
    found = {}
    for kind in ENGINES:
        with engine_of(kind) as engine:
            assert engine.verify(STEPS).ok, kind
            found[kind] = tokens_of(engine)
    return found


@pytest.mark.parametrize("kind", ENGINES)
def test_a_sound_engine_passes(kind: str, sound: dict[str, list[list[int]]]) -> None:
    """Its greedy requests have the tokens that the model has by itself."""
    model = model_of(kind)
    greedy = [model.generate(PROMPTS[i], COUNTS[i]) for i in range(0, len(PROMPTS), 2)]
    assert sound[kind][::2] == greedy


def in_op(name: str, fault: Fault) -> Callable[[Patch], None]:
    """Every call of an op goes through `fault(call, arguments)`; `call` takes replacements."""

    def plant(patch: Patch) -> None:
        real = getattr(ops, name)
        names = [argument.name for argument in real._schema.arguments]

        def faulty(*args: Any) -> None:
            given = dict(zip(names, args, strict=False))
            fault(lambda **other: real(*(given | other).values()), given)

        patch.setattr(ops, name, faulty)

    return plant


def keeping(name: str, where: Callable[[Tensors], Tensor]) -> Fault:
    """The op leaves its output `name` as it was `where` the mask says so."""

    def fault(call: Callable[..., None], given: Tensors) -> None:
        kept = given[name].clone()
        call()
        given[name].copy_(torch.where(where(given), kept, given[name]))

    return fault


def changing(name: str, change: Callable[[Tensor], Tensor]) -> Fault:
    """The op's output `name` is replaced by `change` of it."""

    def fault(call: Callable[..., None], given: Tensors) -> None:
        call()
        given[name].copy_(change(given[name]))

    return fault


def padding(given: Tensors) -> Tensor:
    """Mask [T] of the places past the last row."""
    places = torch.arange(given["positions"].shape[0], device=given["positions"].device)
    return places >= given["query_start"][-1]


def everywhere(given: Tensors) -> Tensor:
    return torch.ones((), dtype=torch.bool, device=given["query_start"].device)


def later_columns(given: Tensors) -> Tensor:
    """Mask [P] of all page-table columns but the first."""
    table = given["page_table"]
    return torch.arange(table.shape[1], device=table.device) > 0


def sees_nothing(given: Tensors) -> Tensor:
    """Mask [T, 1] of the places with an empty visible range."""
    return (given["visible_start"] >= given["visible_end"])[:, None]


def emissions_one_off(call: Callable[..., None], given: Tensors) -> None:
    history = given["history"]
    kept = history.clone()
    call()
    written = history != kept
    history.copy_(torch.where(written.roll(1, 1), history.roll(1, 1), kept))


def merged_onto_the_last(call: Callable[..., None], given: Tensors) -> None:
    kept = given["merged"].clone()
    call()
    given["merged"].add_(kept)


def lengths_that_nobody_writes(patch: Patch) -> None:
    """Attention reads its visible ranges in memory that no step writes."""
    stale, real = torch.ones(64, dtype=torch.int32), Attention.work

    def work(self: Attention, layer: int, step: StepMetadata, *, mixed: bool) -> AttentionWork:
        own = real(self, layer, step, mixed=mixed)
        return replace(own, visible_end=stale[: own.visible_end.shape[0]])

    patch.setattr(Attention, "work", work)


def noise_of_the_step(patch: Patch) -> None:
    """Draws are keyed by a counter of steps on the device instead of by position."""
    steps: list[Tensor] = []

    def fault(call: Callable[..., None], given: Tensors) -> None:
        if not steps:
            steps.append(torch.zeros_like(given["seq_len"]))
        steps[0].add_(1)
        call(seq_len=steps[0])

    in_op("sample", fault)(patch)


def drafts_accepted_unseen(call: Callable[..., None], given: Tensors) -> None:
    """Commit takes what was drawn for what was drafted."""
    drafts, slot = given["draft_tokens"], given["slot_of_row"].long()
    place = torch.arange(drafts.shape[1], device=drafts.device)
    last = given["sampled"].shape[0] - 1
    drawn = given["sampled"][(given["logits_start"][:-1, None] + place).clamp(max=last)]
    spare = torch.cat([drafts, drafts[:1]])  # with a row for padding rows
    spare.index_copy_(0, torch.where(slot < 0, len(drafts), slot), drawn)
    call(draft_tokens=spare[:-1])


def positions_made_anew(patch: Patch) -> None:
    """A metadata tensor is another one after every step."""
    real = StepMetadata.prepare

    def prepare(self: StepMetadata, *args: Any) -> None:
        object.__setattr__(self, "positions", torch.empty_like(self.positions))
        real(self, *args)

    patch.setattr(StepMetadata, "prepare", prepare)


def graph_of_another_bucket(patch: Patch) -> None:
    real = Runner.capture

    def capture(self: Runner, progress: Any) -> None:
        real(self, progress)
        smallest, *others = self.config.buckets.decode
        self.graphs |= dict.fromkeys(others, self.graphs[smallest])

    patch.setattr(Runner, "capture", capture)


def counter_on_the_host(patch: Patch) -> None:
    """A number that Python moves on enters the step."""
    real = Sampler.draw
    count = 0

    def draw(self: Sampler, logits: Tensor, *args: Any) -> Tensor:
        nonlocal count
        count += 1
        return real(self, logits + torch.arange(61, device=logits.device) * (count % 5), *args)

    patch.setattr(Sampler, "draw", draw)


@dataclass(frozen=True, slots=True)
class Mutation:
    """How a fault is planted, what catches it, and the engine that shows it."""

    plant: Callable[[Patch], None]
    caught_by: set[str]
    engine: str = "plain"


MUTATIONS: dict[str, Mutation] = {
    "ranges of padding keep what was left": Mutation(
        in_op("prepare", keeping("visible_end", padding)), {"verify"}
    ),
    "ids of padding keep what was left": Mutation(
        in_op("prepare", keeping("input_ids", padding)), {"verify"}
    ),
    "logits places are not rewritten": Mutation(
        in_op("prepare", keeping("logits_token", everywhere)), {"verify", "tokens"}
    ),
    "lengths of the last step": Mutation(
        in_op("prepare", changing("visible_end", lambda x: (x - 1).clamp(min=0))), {"tokens"}
    ),
    "padding writes to the first entry": Mutation(
        in_op("prepare", changing("kv_slot", lambda x: x.clamp(min=0))), {"tokens"}
    ),
    "attention leaves places that see nothing": Mutation(
        in_op("attend", keeping("lse", sees_nothing)), {"verify", "tokens"}, "ag_rs"
    ),
    "the merge adds to what was there": Mutation(
        in_op("merge_packed", merged_onto_the_last), {"verify", "tokens"}, "a2a"
    ),
    "page-table columns stay": Mutation(
        in_op("admit", keeping("page_table", later_columns)), {"tokens"}
    ),
    "history is one place off": Mutation(in_op("commit", emissions_one_off), {"tokens"}),
    "attention reads stale lengths": Mutation(lengths_that_nobody_writes, {"debug", "tokens"}),
    "noise is keyed by step": Mutation(noise_of_the_step, {"verify", "tokens"}),
    "drafts are accepted unseen": Mutation(
        in_op("commit", drafts_accepted_unseen), {"tokens"}, "drafts"
    ),
    "a metadata tensor is made anew": Mutation(positions_made_anew, {"verify", "audit", "debug"}),
    "another bucket's graph is replayed": Mutation(graph_of_another_bucket, {"verify", "tokens"}),
    "a number of the host is frozen": Mutation(counter_on_the_host, {"verify", "audit", "tokens"}),
}


def caught(engine: Engine, kind: str, tokens: list[list[int]]) -> set[str]:
    """The tools that find something wrong."""
    found = set()
    try:
        engine_of(kind, debug=True).close()
    except CaptureError:
        found.add("debug")
    if not engine.verify(STEPS).ok:
        found.add("verify")
    if not engine.audit().ok:
        found.add("audit")
    try:
        if tokens_of(engine) != tokens:
            found.add("tokens")
    except GraphAttnError:
        found.add("tokens")
    return found


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_is_caught(name: str, sound: dict[str, list[list[int]]], monkeypatch: Patch) -> None:
    mutation = MUTATIONS[name]
    mutation.plant(monkeypatch)
    with engine_of(mutation.engine) as engine:
        assert caught(engine, mutation.engine, sound[mutation.engine]) == mutation.caught_by
