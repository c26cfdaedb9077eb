"""Every option of `capture`: the step audits clean, replays equal eager, nothing stale is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphattn import DCP, MTP, DraftModel, NGram, VirtualGroup
from graphattn.engine import Engine
from graphattn.foreign.sdpa import SDPA
from tests.runtime.serving import make_engine
from tests.runtime.tiny_latent import TinyLatent
from tests.runtime.tiny_model import TinyModel
from tests.runtime.tiny_mtp import KnowingMTP, TinyTarget
from tests.runtime.tiny_recurrent import TinyRecurrent

FP8 = torch.float8_e4m3fn


def dcp(reduce: Any = "ag_rs") -> DCP:
    return DCP(VirtualGroup(2), 3, reduce)


def mtp(k: int, depth: int, **options: Any) -> Callable[[], Engine]:
    def make() -> Engine:
        target = TinyTarget()
        speculate = MTP(k, KnowingMTP(target, depth))
        return opened(target, speculate=speculate, max_tokens=20, **options)

    return make


def engine(model: Callable[[], object] = TinyModel, **options: Any) -> Callable[[], Engine]:
    return lambda: opened(model(), **options)


def opened(model: object, **options: Any) -> Engine:
    return make_engine(model, **({"max_batch": 2, "buckets": [2], "debug": True} | options))


ENGINES: dict[str, Callable[[], Engine]] = {
    "nothing": engine(),
    "windows, soft-cap, sinks": engine(
        lambda: TinyModel(windows=(0, 5, 9), softcap=2.0, sinks=True), buckets=None, page_size=8
    ),
    "latent": engine(TinyLatent),
    "slot tensors": engine(TinyRecurrent),
    "fp8": engine(kv_dtype=FP8),
    "latent, fp8": engine(TinyLatent, kv_dtype=FP8),
    "foreign kernel": engine(attention=SDPA()),
    "lookup": engine(speculate=NGram(3), max_tokens=20),
    "lookup, slot tensors": engine(TinyRecurrent, speculate=NGram(2)),
    "draft model": engine(speculate=DraftModel(TinyModel(windows=(4,)), 2)),
    "one module": mtp(3, 1),
    "chain of modules": mtp(3, 2),
    "ag_rs": engine(dcp=dcp()),
    "a2a": engine(dcp=dcp("a2a")),
    "ag_rs, latent, fp8": engine(TinyLatent, dcp=dcp(), kv_dtype=FP8),
    "a2a, chain of modules": mtp(3, 2, dcp=dcp("a2a")),
    "ag_rs, draft model": engine(dcp=dcp(), speculate=DraftModel(TinyModel(num_q_heads=2), 2)),
    "run ahead, no reuse": engine(run_ahead=4, prefix_reuse=False, num_pages=9, max_seq_len=30),
}


@pytest.mark.parametrize("option", ENGINES)
def test_the_step_is_one_sound_graph(option: str) -> None:
    with ENGINES[option]() as engine:
        report = engine.audit()
        assert report.findings == (), str(report)
        verified = engine.verify(5)
        assert verified.ok, str(verified)
