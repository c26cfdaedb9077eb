"""Latent layers in the runtime: caches, ranks, replay, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from graphattn import DCP, CaptureError, UnsupportedModelError, VirtualGroup
from graphattn.attention import layer_tiles, partial_traffic
from graphattn.bounds import Bounds, local_length
from graphattn.layer_checks import check_layers
from graphattn.models.contract import AttentionLayer, ModelStep
from graphattn.pages import KVPools, page_bytes
from tests.runtime.serving import make_engine, prompts, serve
from tests.runtime.test_replay import HUGE
from tests.runtime.tiny_latent import TinyLatent

JOBS = [(p, 1 + 5 * i % 17) for i, p in enumerate(prompts(8, seed=31, longest=45))]
DEEPSEEK = AttentionLayer(128, 1, 576, scale=0.1, value_dim=512)


@pytest.fixture(scope="module")
def model() -> TinyLatent:
    return TinyLatent()


@pytest.fixture(scope="module")
def expected(model: TinyLatent) -> list[list[int]]:
    return [model.generate(p, n) for p, n in JOBS]


@pytest.mark.parametrize("backend", ["host", "eager"])
def test_tokens_equal_recomputation(
    model: TinyLatent, expected: list[list[int]], backend: str
) -> None:
    """Latent layers with and without a window, beside a layer of keys and values."""
    assert [bool(x.value_dim) for x in model.attention_layers] == [True, True, False]
    with make_engine(model, backend=backend) as engine:
        assert [r.token_ids for r in serve(engine, JOBS)] == expected
        assert engine.stats().fallbacks == 0


LAYOUTS = [
    (2, 16, "ag_rs", "host"),
    (3, 5, "a2a", "eager"),
    (4, 1, "a2a", "host"),
    *(
        pytest.param(W, I, reduce, backend, marks=pytest.mark.slow)
        for W, I in ((2, 1), (2, 3), (4, 16), (4, 64))
        for reduce in ("ag_rs", "a2a")
        for backend in ("host", "eager")
    ),
]


@pytest.mark.parametrize(("W", "I", "reduce", "backend"), LAYOUTS)
def test_tokens_are_those_of_one_rank(
    model: TinyLatent, expected: list[list[int]], W: int, I: int, reduce: str, backend: str
) -> None:
    dcp = DCP(VirtualGroup(W), I, reduce)  # type: ignore[arg-type]
    with make_engine(model, dcp=dcp, backend=backend) as engine:
        assert [r.token_ids for r in serve(engine, JOBS)] == expected


def test_stale_pages_and_unused_columns_are_never_read(
    model: TinyLatent, expected: list[list[int]]
) -> None:
    """NaN in every latent that was not written, huge ids in every unused page-table column."""
    with make_engine(model, dcp=DCP(VirtualGroup(2), 3)) as engine:
        for pool in engine._runner.pools().values():
            pool.fill_(float("nan"))
        engine._runner.memory.state.page_table.fill_(HUGE)
        assert [r.token_ids for r in serve(engine, JOBS)] == expected


def test_replay_verifies_and_audits_clean(model: TinyLatent) -> None:
    with make_engine(model, dcp=DCP(VirtualGroup(2), 3, "a2a")) as engine:
        report = engine.verify(30)
        assert report.ok, str(report)
        assert engine.audit().findings == ()


def test_each_rank_holds_the_latents_of_its_positions(model: TinyLatent) -> None:
    W, I, length = 3, 2, 17
    with make_engine(model, dcp=DCP(VirtualGroup(W), I)) as engine:
        engine.submit(list(range(1, length + 1)), max_new_tokens=4)
        engine.step()
        engine.step()
        for rank, shard in enumerate(engine._runner.memory.target.shards):
            held = int((shard.pools.keys[0] != 0).any(-1).sum())
            assert held == local_length(length, rank, W, I)


def test_weights_updated_in_place_are_seen_by_the_next_replay() -> None:
    model, other = TinyLatent(), TinyLatent(seed=1)
    with make_engine(model) as engine:
        (before,) = engine.generate([[1, 2, 3]], max_new_tokens=10)
        with torch.no_grad():
            for mine, new in zip(model.parameters(), other.parameters(), strict=True):
                mine.copy_(new)
        (after,) = engine.generate([[1, 2, 3]], max_new_tokens=10)
    assert list(after.token_ids) == other.generate([1, 2, 3], 10)
    assert after.token_ids != before.token_ids


def test_a_latent_layer_keeps_its_latents_and_nothing_else() -> None:
    layers = (DEEPSEEK, AttentionLayer(4, 2, 8, scale=1.0))
    bounds = Bounds(
        max_batch=2, max_seq_len=24, max_tokens=8, page_size=4, num_pages=6, vocab_size=5
    )
    pools = KVPools.allocate(layers, bounds, torch.bfloat16, torch.device("cpu"))
    assert [tuple(p.shape) for p in pools.keys] == [(6, 1, 4, 576), (6, 2, 4, 8)]
    assert pools.values[0] is None
    assert set(pools.tensors()) == {"keys.0", "keys.1", "values.1"}
    assert page_bytes(layers, 4, torch.bfloat16) == 4 * (576 + 2 * 2 * 8) * 2
    assert pools.num_bytes == 6 * page_bytes(layers, 4, torch.bfloat16)


def test_report_has_bytes_per_token_and_partial_traffic(model: TinyLatent) -> None:
    with make_engine(model, dcp=DCP(VirtualGroup(2))) as engine:
        report = engine.report()
    latent, whole = 12 * 4, 2 * 2 * 8 * 4
    assert report.kv_bytes_per_token == 2 * latent + whole
    chunk = engine._runner.memory.target.shape.chunk
    assert report.partial_traffic == 2 * 6 * 8 * 4 / (chunk * latent)
    assert f"at most {report.partial_traffic:.1%} of the KV traffic" in str(report)


@pytest.mark.parametrize("arch", ["cpu", "sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("decode_query_len", [1, 2, 5])
@pytest.mark.parametrize("heads", [16, 32, 128])
def test_partials_are_a_small_part_of_the_traffic(
    arch: str, decode_query_len: int, heads: int
) -> None:
    """At most 15 % of the bytes of the latents, at the smallest split."""
    layer = replace(DEEPSEEK, num_q_heads=heads)
    dtype = torch.bfloat16
    tiles = layer_tiles(layer, arch, page_size=64, decode_query_len=decode_query_len, dtype=dtype)
    assert partial_traffic(layer, tiles.chunk, decode_query_len, dtype) <= 0.15


REFUSED = [
    (replace(DEEPSEEK, num_q_heads=129), "129 query heads on 1 latents"),
    (replace(DEEPSEEK, num_kv_heads=2), "128 query heads on 2 latents"),
    (replace(DEEPSEEK, head_dim=577), r"latents of 512 \+ 65 values"),
    (replace(DEEPSEEK, value_dim=513), r"latents of 513 \+ 63 values"),
    (replace(DEEPSEEK, value_dim=576), r"latents of 576 \+ 0 values"),
    (replace(DEEPSEEK, softcap=2.0), "soft-cap or sinks"),
    (replace(DEEPSEEK, sinks=torch.zeros(128)), "soft-cap or sinks"),
]


@pytest.mark.parametrize(("layer", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_geometries_that_no_kernel_covers_are_refused(layer: AttentionLayer, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"layer 0: latent attention.*{message}"):
        check_layers([layer])


class _OtherCall(TinyLatent):
    """Calls for each kind of layer what serves the other."""

    def forward(self, step: ModelStep) -> Tensor:
        x = self.embed(step.input_ids)
        if self.attention_layers[0].value_dim:
            return step.attend(0, *self._split(0, x))
        return step.attend_latent(0, x, x)


@pytest.mark.parametrize(
    ("latent", "message"),
    [((0,), "layer 0 is latent: its model calls attend_latent"), ((), "layer 0 is not latent")],
)
def test_a_layer_is_served_by_its_own_call(latent: tuple[int, ...], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        make_engine(_OtherCall(latent=latent), backend="eager")
