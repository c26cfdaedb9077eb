"""Multi-token prediction in the step: modules of the contract that know the target.

What such a module drafts is right exactly where it should be, so every fault of alignment, cache or
metadata shows as a wrong draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from graphattn import (
    DCP,
    MTP,
    CaptureError,
    ConfigError,
    SamplingParams,
    UnsupportedModelError,
    VirtualGroup,
)
from graphattn.bounds import kv_place
from graphattn.engine import Engine
from graphattn.request import Request
from graphattn.sizing import widest_window
from tests.runtime.lagging_stream import LaggingStream
from tests.runtime.serving import make_engine
from tests.runtime.tiny_model import TinyModel
from tests.runtime.tiny_mtp import WINDOW, KnowingMTP, TinyTarget, fails_at, windowful

TEXTS = windowful(4, seed=12, longest=35)
TOKENS = 13
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "presence_penalty": 0.2}


def virtual(W: int, I: int, reduce: str = "ag_rs") -> DCP | None:
    return DCP(VirtualGroup(W), I, reduce) if W > 1 else None  # type: ignore[arg-type]


def params(i: int) -> SamplingParams:
    """Greedy and sampled requests in turn."""
    return SamplingParams(TOKENS, seed=100 + i, **(SAMPLED if i % 2 else {}))


def serve(
    engine: Engine,
    *,
    greedy: bool = False,
    after_step: Callable[[], object] = lambda: None,
) -> list[Request]:
    requests = [
        engine.submit(text, SamplingParams(TOKENS) if greedy else params(i))
        for i, text in enumerate(TEXTS)
    ]
    while engine.busy:
        engine.step()
        engine.poll()
        after_step()
    return requests


@pytest.fixture(scope="module")
def target() -> TinyTarget:
    return TinyTarget()


@pytest.fixture(scope="module")
def greedy(target: TinyTarget) -> list[list[int]]:
    """Recomputed from scratch for each token."""
    tokens = [target.generate(text, TOKENS) for text in TEXTS]
    assert len({t for each in tokens for t in each}) > 20, "tokens must vary"
    return tokens


@pytest.fixture(scope="module")
def plain(target: TinyTarget, greedy: list[list[int]]) -> list[list[int]]:
    """Greedy and sampled in turn, without drafts."""
    with make_engine(target) as engine:
        tokens = [r.token_ids for r in serve(engine)]
    assert tokens[::2] == greedy[::2]
    return tokens


LAYOUTS = [(1, 1, "ag_rs"), (2, 1, "a2a"), (2, 16, "ag_rs"), (4, 1, "ag_rs"), (4, 16, "a2a")]
WHOLE = [
    pytest.param(k, depth, *layout, backend, max_tokens, marks=pytest.mark.slow)
    for k in (1, 2, 3, 4)
    for depth in (1, 2, 3)
    for layout in LAYOUTS
    for backend, max_tokens in (("host", 20), ("eager", 53))
]
FEW = [
    (1, 1, 1, 1, "ag_rs", "host", 20),
    (2, 1, 2, 16, "ag_rs", "eager", 37),
    (4, 1, 4, 1, "a2a", "host", 23),
    (3, 2, 2, 1, "ag_rs", "eager", 16),
]


@pytest.mark.parametrize(
    ("k", "depth", "W", "I", "reduce", "backend", "max_tokens"), [*FEW, *WHOLE]
)
def test_no_token_changes_and_a_right_module_is_always_right(
    target: TinyTarget,
    greedy: list[list[int]],
    plain: list[list[int]],
    k: int,
    depth: int,
    W: int,
    I: int,
    reduce: str,
    backend: str,
    max_tokens: int,
) -> None:
    """Greedy and sampled; prompts in chunks of many sizes beside rows that decode."""
    options = {"dcp": virtual(W, I, reduce), "backend": backend, "max_tokens": max_tokens}
    with make_engine(target, speculate=MTP(k, KnowingMTP(target, depth)), **options) as engine:
        assert [r.token_ids for r in serve(engine)] == plain
        before = engine.stats()
        assert [r.token_ids for r in serve(engine, greedy=True)] == greedy
        stats = engine.stats()
        assert stats.fallbacks == 0
        drafted = stats.tokens_drafted - before.tokens_drafted
        assert drafted == stats.tokens_accepted - before.tokens_accepted > 0
        assert min(stats.drafted_by_place) > 0


class Watch:
    """Every draft that stands after a step, with the request and the position it is for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.drafts: list[tuple[Request, int, list[int]]] = []

    def __call__(self) -> None:
        state = self._engine._runner.memory.state
        for seat in self._engine._scheduler._seats.values():
            count = int(state.draft_count[seat.slot])
            if count and int(state.finish[seat.slot]) == 0:
                drafts = state.draft_tokens[seat.slot, :count].tolist()
                self.drafts.append((seat.request, int(state.seq_len[seat.slot]), drafts))

    def beside_truth(self) -> Iterator[tuple[int, int, int, bool]]:
        """(position, draft, token, whether all before it were right) where the request got to."""
        for request, first, drafts in self.drafts:
            tokens, right = [*request.prompt, *request.token_ids], True
            for position, draft in enumerate(drafts, first):
                if position < len(tokens):
                    yield position, draft, tokens[position], right
                    right &= draft == tokens[position]


def check_partly_wrong(watch: Watch) -> None:
    """After right drafts a draft is right, or wrong on purpose."""
    seen = [(p, draft == token) for p, draft, token, fair in watch.beside_truth() if fair]
    fails = fails_at(torch.arange(100)).tolist()
    assert all(right != fails[p] for p, right in seen)
    assert {right for _, right in seen} == {True, False}


def check_caches(engine: Engine, target: TinyTarget, depth: int) -> int:
    """Every entry of the modules' caches that can still be seen is that of the committed tokens;
    how many there are.

    Module i holds position p + i + 1 at place p, as far as that token is committed. A chain sees
    depth - 1 places again; pages behind their windows are returned.
    """
    runner, bounds = engine._runner, engine.config.bounds
    state, drafter = runner.memory.state, runner.drafter
    count = 0
    for seat in engine._scheduler._seats.values():
        seq_len = int(state.seq_len[seat.slot])
        tokens = state.history[seat.slot, :seq_len].long()
        x = target.embed(tokens) + target.position.weight[:seq_len]
        keys = target._split(0, x)[1]
        for index in range(depth):
            context_len = int(state.context_len[seat.slot])
            first = max(0, context_len - (depth - 1) - WINDOW + 1)
            for p in range(first, min(context_len, seq_len - index - 1)):
                place = kv_place(p, bounds.dcp_size, bounds.interleave, bounds.page_size)
                pool = drafter.memory.shards[place.rank].pools.keys[index]
                got = pool[state.page_table[seat.slot, place.column], :, place.offset]
                torch.testing.assert_close(got, keys[p + index + 1], rtol=1e-5, atol=1e-5)
                count += 1
    return count


@pytest.mark.parametrize(
    ("k", "depth", "W", "I"),
    [
        (3, 1, 4, 2),
        (4, 2, 1, 1),
        (3, 3, 2, 3),
        *(
            pytest.param(k, depth, W, I, marks=pytest.mark.slow)
            for k in (1, 2, 3, 4)
            for depth in (1, 2, 3, 4)
            for W, I in ((1, 1), (2, 1), (4, 16))
        ),
    ],
)
def test_partial_acceptance_leaves_every_later_draft_right(
    target: TinyTarget, greedy: list[list[int]], k: int, depth: int, W: int, I: int
) -> None:
    """Cases A5, A6: what follows a rejection is derived from committed lengths; A7, A11: shards are
    empty for the first tokens. Rejected tokens leave nothing behind in the caches of a chain."""
    module = KnowingMTP(target, depth, fails=True)
    options = {"dcp": virtual(W, I), "run_ahead": 1, "max_tokens": 21}
    with make_engine(target, speculate=MTP(k, module), **options) as engine:
        watch, entries = Watch(engine), 0

        def after_step() -> None:
            nonlocal entries
            watch()
            entries += check_caches(engine, target, min(depth, k))

        requests = serve(engine, greedy=True, after_step=after_step)
    assert [r.token_ids for r in requests] == greedy
    assert entries > 100
    check_partly_wrong(watch)


@pytest.mark.parametrize(("k", "depth", "window"), [(2, 1, 5), (3, 3, 7), (2, 3, 6), (1, 3, 5)])
def test_pages_return_from_behind_all_that_a_chain_sees_again(
    target: TinyTarget, k: int, depth: int, window: int
) -> None:
    assert widest_window(target, MTP(k, KnowingMTP(target, depth)).resolve(target)) == window


def test_rows_of_a_chain_keep_the_kind_that_they_have_for_the_target(target: TinyTarget) -> None:
    """A row that decodes sees places of its prompt again, and is a decode row all the same: a
    decode graph has no prefill items."""
    with make_engine(target, speculate=MTP(3, KnowingMTP(target, 3)), run_ahead=1) as engine:
        memory, drafter, kinds = engine._runner.memory, engine._runner.drafter, set()
        step, state = drafter.memory.shards[0].buffers, memory.state  # of the last module's pass

        def after_step() -> None:
            for row, slot in enumerate(memory.inputs.slot_of_row.tolist()):
                if slot >= 0 and int(state.finish[slot]) == 0:
                    decodes = bool(drafter.drafting.committed[slot] >= state.prompt_len[slot])
                    assert bool(step.row_splits[0, row] > 0) == decodes
                    kinds.add((decodes, int(step.token_count[row])))

        serve(engine, greedy=True, after_step=after_step)
    assert {decodes for decodes, _ in kinds} == {True, False}
    assert max(count for decodes, count in kinds if decodes) == 4 + 2


@pytest.mark.parametrize(
    ("run_ahead", "W"), [(3, 1), *(pytest.param(r, 4, marks=pytest.mark.slow) for r in (1, 2, 3))]
)
def test_late_steps_change_no_token(
    target: TinyTarget, plain: list[list[int]], run_ahead: int, W: int
) -> None:
    options = {"run_ahead": run_ahead, "dcp": virtual(W, 2), "stream": LaggingStream(pace=2)}
    module = KnowingMTP(target, fails=True)
    with make_engine(target, speculate=MTP(2, module), **options) as engine:
        assert [r.token_ids for r in serve(engine)] == plain


@pytest.mark.parametrize(("depth", "dcp"), [(1, virtual(2, 3)), (3, None)], ids=["dcp", "chain"])
def test_replay_verifies_and_audits_clean(target: TinyTarget, depth: int, dcp: DCP | None) -> None:
    options = {"dcp": dcp, "max_batch": 3}
    with make_engine(target, speculate=MTP(3, KnowingMTP(target, depth)), **options) as engine:
        report = engine.verify(12)
        assert report.ok, str(report)
        assert engine.audit().findings == ()


def test_pages_and_scratch_of_the_module_are_the_engines(target: TinyTarget) -> None:
    """Reported, poisoned and kept out of the capture like the target's."""
    with make_engine(target, speculate=MTP(2, KnowingMTP(target, 2)), dcp=virtual(2, 1)) as engine:
        own = [name for name in engine._runner.pools() if name.startswith("mtp.")]
        assert len(own) == 2 * 2 * 2  # modules, ranks, K and V
        assert all(not bool(engine._runner.pools()[name].any()) for name in own)


@pytest.mark.parametrize("k", [0, 16, True, 1.0])
def test_a_bad_number_of_drafts_is_named(k: Any) -> None:
    with pytest.raises(ConfigError, match=r"k: wanted an integer in 1\.\.15"):
        MTP(k)


def test_a_model_without_a_module_says_what_to_pass(target: TinyTarget) -> None:
    with pytest.raises(UnsupportedModelError, match=r"Pass MTP\(k, module=\.\.\.\)"):
        make_engine(target, speculate=MTP(1))


def test_a_module_that_does_not_meet_the_contract_is_named(target: TinyTarget) -> None:
    with pytest.raises(UnsupportedModelError, match=r"got Linear without depth, hidden_size"):
        make_engine(target, speculate=MTP(1, torch.nn.Linear(2, 2)))


def test_a_module_that_does_not_fit_is_named(target: TinyTarget) -> None:
    def fitted(**changed: Any) -> MTP:
        module = KnowingMTP(target)
        for name, value in changed.items():
            setattr(module, name, value)
        return MTP(1, module)

    with pytest.raises(UnsupportedModelError, match="vocabulary of 61, got 30"):
        make_engine(target, speculate=fitted(vocab_size=30))
    with pytest.raises(ConfigError, match=r"at most their 32, got 96"):
        make_engine(target, speculate=fitted(max_seq_len=32))
    with pytest.raises(ConfigError, match=r"MTP module: wanted a module on cpu, got .*meta"):
        make_engine(target, speculate=fitted(device=torch.device("meta")))


def test_a_target_that_offers_nothing_is_told_so() -> None:
    model = TinyModel(windows=(WINDOW,))
    with pytest.raises(CaptureError, match=r"step\.features\['hidden'\]"):
        make_engine(model, speculate=MTP(1, KnowingMTP(TinyTarget())))
