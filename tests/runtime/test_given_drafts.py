"""Query lengths above one: drafts put into the slot state by hand, right ones and wrong ones.

Whatever the drafts, the tokens are those of plain decoding; with and without context parallelism.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from graphattn import DCP, VirtualGroup
from graphattn.config import resolve_buckets
from graphattn.engine import Engine
from graphattn.models import adapt
from graphattn.sizing import Options, resolve
from graphattn.stream import HostStream
from tests.runtime.serving import DEFAULTS, prompts
from tests.runtime.tiny_model import TinyModel

JOBS = [(p, 2 + 7 * i % 19) for i, p in enumerate(prompts(8, seed=41, longest=30))]


def drafting_engine(model: TinyModel, drafts: int, dcp: DCP | None, backend: str) -> Engine:
    options = Options(**(DEFAULTS | {"dcp": dcp, "run_ahead": 1, "backend": backend}))
    config = resolve(options, adapt(model))
    tokens = max(config.bounds.max_tokens, config.bounds.max_batch * (1 + drafts))
    bounds = replace(config.bounds, max_drafts=drafts, max_tokens=tokens)
    config = replace(config, bounds=bounds, buckets=resolve_buckets(bounds, None))
    return Engine(adapt(model), config, HostStream())


def put_drafts(
    engine: Engine, futures: dict[tuple[int, ...], list[int]], rng: random.Random
) -> int:
    """0 to k drafts for each decoding slot: a right prefix, then perhaps a wrong token."""
    state, bounds, given = engine._runner.memory.state, engine.config.bounds, 0
    for seat in engine._scheduler._seats.values():
        if seat.prefilling or state.finish[seat.slot] != 0:
            continue
        request = seat.request
        future = futures[request.prompt][len(request.token_ids) :]
        count = rng.randint(0, bounds.max_drafts)
        right = rng.randint(0, count)
        drafts = [*future[:right], *(rng.randrange(61) for _ in range(count))][:count]
        state.draft_tokens[seat.slot, :count] = torch.tensor(drafts, dtype=torch.int32)
        state.draft_count[seat.slot] = count
        given += count
    return given


@pytest.mark.parametrize("drafts", [1, 3])
@pytest.mark.parametrize(
    ("W", "I", "reduce", "backend"),
    [
        (1, 1, "ag_rs", "host"),
        (2, 1, "a2a", "host"),
        (4, 1, "ag_rs", "eager"),
        (4, 16, "a2a", "host"),
        (2, 3, "ag_rs", "host"),
    ],
)
def test_drafts_never_change_a_token(
    drafts: int, W: int, I: int, reduce: str, backend: str
) -> None:
    """Elsewhere MTP with a sharded cache inside a graph cut texts off or looped."""
    model = TinyModel(softcap=2.0, sinks=True, windows=(5, 0))
    futures = {tuple(p): model.generate(p, n) for p, n in JOBS}
    dcp = DCP(VirtualGroup(W), I, reduce) if W > 1 else None  # type: ignore[arg-type]
    rng, given = random.Random(drafts), 0
    with drafting_engine(model, drafts, dcp, backend) as engine:
        requests = [engine.submit(p, max_new_tokens=n) for p, n in JOBS]
        while engine.busy:
            engine.step()
            engine.poll()
            given += put_drafts(engine, futures, rng)
        for request in requests:
            assert request.token_ids == futures[request.prompt]
        plain = sum(len(f) for f in futures.values())
        assert given > plain / 4, "hardly any draft was given"
        assert engine.stats().steps < plain, "no draft was ever accepted"


def test_nothing_beyond_max_seq_len_with_drafts() -> None:
    model = TinyModel(windows=(0,), max_seq_len=24)
    plain = model.generate([3] * 9, 100)
    with drafting_engine(model, 3, None, "host") as engine:
        request = engine.submit([3] * 9, max_new_tokens=100)
        rng = random.Random(0)
        while engine.busy:
            engine.step()
            engine.poll()
            put_drafts(engine, {tuple([3] * 9): plain + [1] * 9}, rng)
        assert request.token_ids == plain
        assert len(plain) == 15
