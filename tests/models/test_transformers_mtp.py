"""transformers' `MtpModel` in the step against itself from scratch, at every commit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

from graphattn import DCP, MTP, UnsupportedModelError, VirtualGroup
from graphattn.engine import Engine
from tests.models.families import VOCAB, tiny
from tests.models.mtp_families import with_mtp
from tests.models.mtp_oracle import drafts_from_scratch
from tests.runtime.serving import make_engine

NEW_TOKENS = 12
RNG = random.Random(3)
TEXTS = [[RNG.randrange(VOCAB) for _ in range(n)] for n in (1, 21, 9, 5)]


def generate(model: PreTrainedModel, prompt: Sequence[int], **options: Any) -> list[int]:
    ids = torch.tensor([list(prompt)])
    out = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        **options,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


class Drafts:
    """The drafts after each commit, by the tokens before them; then others are put in their place.

    A random model is hardly ever right about another, so here some drafts are made right and some
    rows go without: steps accept none, a part, or all.
    """

    def __init__(self, engine: Engine, futures: dict[tuple[int, ...], list[int]]) -> None:
        self._engine, self._futures, self._rng = engine, futures, random.Random(0)
        self.seen: dict[tuple[int, ...], list[int]] = {}

    def look_and_replace(self) -> None:
        state, k = self._engine._runner.memory.state, self._engine.config.bounds.max_drafts
        for seat in self._engine._scheduler._seats.values():
            count = int(state.draft_count[seat.slot])
            if not count or int(state.finish[seat.slot]):
                continue
            slot, request = seat.slot, seat.request
            tokens = tuple(state.history[slot, : int(state.seq_len[slot])].tolist())
            self.seen[tokens] = state.draft_tokens[slot, :count].tolist()
            future = self._futures[request.prompt][len(tokens) - len(request.prompt) :]
            right = self._rng.randint(0, k)
            others = [self._rng.randrange(VOCAB) for _ in range(k)]
            given = [*future[:right], *others][:k]
            state.draft_tokens[slot] = torch.tensor(given, dtype=torch.int32)
            state.draft_count[slot] = self._rng.choice([0, 1, count])


CASES = [
    ("glm4-moe", 1, 2, 1, 1, "host", 16),
    ("glm4-moe", 3, 4, 4, 2, "eager", 23),
    ("deepseek-v3", 1, 3, 4, 16, "host", 16),
    ("deepseek-v3-yarn", 2, 2, 2, 1, "eager", 13),
]
SLOW = [
    pytest.param(family, depth, k, W, I, backend, max_tokens, marks=pytest.mark.slow)
    for family in ("glm4-moe", "deepseek-v3", "deepseek-v3-yarn")
    for depth, k in ((1, 1), (1, 4), (2, 1), (2, 4), (3, 3))
    for W, I in ((1, 1), (2, 16), (4, 1))
    for backend, max_tokens in (("host", 20), ("eager", 40))
]


@pytest.mark.parametrize(
    ("family", "depth", "k", "W", "I", "backend", "max_tokens"), [*CASES, *SLOW]
)
def test_every_draft_is_that_of_the_module_from_scratch(
    family: str, depth: int, k: int, W: int, I: int, backend: str, max_tokens: int
) -> None:
    model, mtp = with_mtp(family, depth)
    futures = {tuple(p): generate(model, p) for p in TEXTS}
    assert len({t for tokens in futures.values() for t in tokens}) > 10, "tokens must vary"
    dcp = DCP(VirtualGroup(W), I, "a2a" if I > 1 else "ag_rs") if W > 1 else None
    options: dict[str, Any] = {"run_ahead": 1, "dcp": dcp, "backend": backend, "max_batch": 3}
    options |= {"max_tokens": max_tokens, "max_seq_len": 40}
    with make_engine(model, speculate=MTP(k, mtp), **options) as engine:
        requests = [engine.submit(p, max_new_tokens=NEW_TOKENS) for p in TEXTS]
        drafts = Drafts(engine, futures)
        while engine.busy:
            engine.step()
            engine.poll()
            drafts.look_and_replace()
        accepted, drafted = engine.stats().tokens_accepted, engine.stats().tokens_drafted
    assert [r.token_ids for r in requests] == [futures[tuple(p)] for p in TEXTS]
    assert 0 < accepted < drafted
    assert len(drafts.seen) > 12
    for tokens, got in drafts.seen.items():
        assert got == drafts_from_scratch(model, mtp, tokens, len(got)), len(tokens)


@pytest.mark.parametrize(("family", "depth"), [("glm4-moe", 2), ("deepseek-v3", 1)])
def test_drafts_are_those_of_generate_with_mtp(
    family: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the number of modules, as that is what transformers drafts."""
    model, mtp = with_mtp(family, depth)
    candidates: dict[tuple[int, ...], list[int]] = {}
    original = MTPCandidateGenerator.get_candidates

    def recorded(self: Any, input_ids: torch.Tensor, **options: Any) -> Any:
        ids, logits = original(self, input_ids, **options)
        if logits is not None:
            tokens = input_ids[0].tolist()
            candidates[tuple(tokens)] = ids[0, len(tokens) :].tolist()
        return ids, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", recorded)
    monkeypatch.setattr(MtpModel, "from_pretrained", lambda *args, **options: mtp)
    text = TEXTS[1]
    want = generate(model, text, use_mtp=True)
    with make_engine(model, speculate=MTP(depth, mtp), run_ahead=1, max_seq_len=40) as engine:
        request = engine.submit(text, max_new_tokens=NEW_TOKENS)
        state, seen = engine._runner.memory.state, {}
        while engine.busy:
            engine.step()
            engine.poll()
            if int(state.draft_count[0]) and not int(state.finish[0]):
                tokens = tuple(state.history[0, : int(state.seq_len[0])].tolist())
                seen[tokens] = state.draft_tokens[0].tolist()
    assert request.token_ids == want
    common = seen.keys() & candidates.keys()
    assert len(common) >= len(candidates) - depth
    assert all(seen[tokens] == candidates[tokens] for tokens in common)


def test_embedding_and_head_are_the_targets(engine_of_glm: Engine) -> None:
    module = engine_of_glm.config.speculate.module.module  # type: ignore[union-attr]
    model, _ = with_mtp("glm4-moe", 1)
    assert module.embed_tokens.weight is model.get_input_embeddings().weight
    assert module.shared_head.weight is model.get_output_embeddings().weight


@pytest.fixture
def engine_of_glm() -> Any:
    model, mtp = with_mtp("glm4-moe", 1)
    with make_engine(model, speculate=MTP(1, mtp), max_seq_len=40, backend="eager") as engine:
        yield engine


def test_audit_finds_nothing_and_the_owners_module_is_untouched(engine_of_glm: Engine) -> None:
    report = engine_of_glm.audit()
    assert not report.findings, str(report)
    _, mtp = with_mtp("glm4-moe", 1)
    assert "create_masks_for_mtp_layer" not in vars(mtp)
    assert mtp.config._attn_implementation == "sdpa"


def test_a_model_whose_configuration_names_no_modules_says_what_to_pass() -> None:
    with pytest.raises(UnsupportedModelError, match=r"no MTP modules .*MTP\(k, module=\.\.\.\)"):
        make_engine(tiny("llama"), speculate=MTP(1))


def test_weights_that_cannot_be_found_say_what_to_pass(tmp_path: Path) -> None:
    """A model that was made has no checkpoint to look in; another's may be without modules."""
    model, _ = with_mtp("deepseek-v3", 1)
    with pytest.raises(UnsupportedModelError, match=r"not loaded from a checkpoint .*MTP\(k, mod"):
        make_engine(model, speculate=MTP(1))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with pytest.raises(UnsupportedModelError, match=r"cannot be loaded from .*MTP\(k, module=\.\."):
        make_engine(loaded, speculate=MTP(1))


def test_a_module_of_another_kind_is_named() -> None:
    model, _ = with_mtp("glm4-moe", 1)
    with pytest.raises(UnsupportedModelError, match=r"wanted a transformers MtpModel, got Llama"):
        make_engine(model, speculate=MTP(1, tiny("llama")))
