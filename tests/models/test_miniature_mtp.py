"""The trained miniature drafts with its own module: what is accepted on text it has not seen.

Shares of accepted drafts are regression values, by place; another CPU rounds differently and may
move them by a draft or two.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from graphattn import DCP, MTP, SamplingParams, VirtualGroup
from graphattn.engine import Engine
from profiles.miniature.model import CHECKPOINT, load, load_mtp
from profiles.miniature.text import held_out_prompts
from tests.models.mtp_oracle import drafts_from_scratch
from tests.runtime.serving import make_engine

PROMPTS, TOKENS = held_out_prompts(8, 48), 32
ACCEPTED = {  # by temperature and k, at each place; greedy texts soon repeat themselves
    (0.0, 1): (0.97,),
    (0.0, 2): (0.95, 0.63),
    (0.0, 3): (0.95, 0.60, 0.39),
    (0.0, 4): (0.95, 0.59, 0.38, 0.27),
    (0.7, 1): (0.72,),
    (0.7, 2): (0.68, 0.40),
    (0.7, 3): (0.67, 0.40, 0.21),
    (0.7, 4): (0.65, 0.37, 0.20, 0.11),
}
TOLERANCE = 0.06


@cache
def loaded() -> Any:
    """As anybody loads it, who knows nothing of what transformers wants for its module."""
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT, local_files_only=True).eval()


@pytest.fixture
def model() -> Any:
    return loaded()


def engine(model: Any, speculate: MTP | None, **options: Any) -> Engine:
    given = {"max_batch": 4, "max_tokens": 64, "max_seq_len": 128, "page_size": 16} | options
    return make_engine(model, speculate=speculate, **given)


def serve(engine: Engine, temperature: float) -> list[tuple[int, ...]]:
    requests = [
        engine.submit(p, SamplingParams(TOKENS, temperature=temperature, seed=i, ignore_eos=True))
        for i, p in enumerate(PROMPTS)
    ]
    while engine.busy:
        engine.step()
    return [tuple(r.token_ids) for r in requests]


@cache
def plain(temperature: float) -> list[tuple[int, ...]]:
    """Without drafts."""
    with engine(loaded(), None, backend="eager") as alone:
        return serve(alone, temperature)


@pytest.mark.parametrize(
    ("temperature", "k"),
    [(t, k) if k == 1 else pytest.param(t, k, marks=pytest.mark.slow) for t, k in ACCEPTED],
)
def test_acceptance_on_held_out_text(model: Any, temperature: float, k: int) -> None:
    with engine(model, MTP(k)) as drafting:
        assert serve(drafting, temperature) == plain(temperature)
        stats = drafting.stats()
    shares = [a / d for a, d in zip(stats.accepted_by_place, stats.drafted_by_place, strict=True)]
    assert shares == pytest.approx(ACCEPTED[temperature, k], abs=TOLERANCE)
    assert shares[0] > 0.5


LAYOUTS = [(4, 16, "a2a", 2)]
SLOW = [
    pytest.param(W, I, reduce, k, marks=pytest.mark.slow)
    for W, I, reduce in ((1, 1, "ag_rs"), (2, 1, "a2a"), (2, 16, "ag_rs"), (4, 1, "ag_rs"))
    for k in (1, 2, 3, 4)
]


@pytest.mark.parametrize(("W", "I", "reduce", "k"), [*LAYOUTS, *SLOW])
def test_latents_over_ranks_change_no_token_and_no_acceptance(
    model: Any, W: int, I: int, reduce: str, k: int
) -> None:
    """The pages of the module are sharded like the target's."""
    dcp = DCP(VirtualGroup(W), I, reduce) if W > 1 else None  # type: ignore[arg-type]
    with engine(model, MTP(k), dcp=dcp, max_tokens=48, backend="eager") as drafting:
        assert serve(drafting, 0.7) == plain(0.7)
        stats = drafting.stats()
    shares = [a / d for a, d in zip(stats.accepted_by_place, stats.drafted_by_place, strict=True)]
    assert shares == pytest.approx(ACCEPTED[0.7, k], abs=TOLERANCE)


def test_its_first_drafts_are_those_of_transformers_module(model: Any) -> None:
    """Loaded by the engine, and by transformers once it is told this model's layer number."""
    reference = load()
    mtp = load_mtp(reference)
    with engine(model, MTP(2), run_ahead=1, max_batch=1, backend="eager") as drafting:
        request = drafting.submit(PROMPTS[0], max_new_tokens=12)
        state, seen = drafting._runner.memory.state, {}
        while drafting.busy:
            drafting.step()
            drafting.poll()
            if int(state.draft_count[0]) == 2 and not int(state.finish[0]):
                tokens = state.history[0, : int(state.seq_len[0])].tolist()
                seen[tuple(tokens)] = state.draft_tokens[0].tolist()
    ids = torch.tensor([PROMPTS[0]])
    want = reference.generate(ids, max_new_tokens=12, do_sample=False, use_mtp=True)
    assert request.token_ids == want[0, ids.shape[1] :].tolist()
    assert len(seen) >= 4
    for tokens, drafts in seen.items():
        assert drafts == drafts_from_scratch(reference, mtp, tokens, 2)
