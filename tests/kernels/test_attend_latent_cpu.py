"""attend_latent on the CPU against float64, and against attention that is not absorbed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from graphattn.kernels import attend_plan_cpu, ops
from tests.kernels.attend_case import Row, Setting, shards
from tests.kernels.latent_case import Latent, LatentCase, build, check, union

ON_CPU = Setting(device="cpu", decode_query_len=4)

DECODE = [Row(n, 1, seed=10 * n) for n in (0, 15, 16, 69)]
MIXED = [
    Row(5, 4, seed=10),
    Row(40, 1, seed=20),
    Row(0, 37, prefill=True, seed=30),
    Row(17, 4, tokens=2, seed=40),
    Row(0, 0, padding=True),
    Row(9, 4, tokens=0, seed=50),
    Row(30, 19, prefill=True, seed=60),
]


def run(rows: list[Row], latent: Latent) -> LatentCase:
    case = build(rows, latent)
    ops.attend_latent(*case.args.values())
    return case


GEOMETRIES = {
    "miniature": Latent(4, 32, 16),
    "odd": Latent(3, 48, 8, replace(ON_CPU, page_size=5)),
    "one head, bf16": Latent(1, 64, 16, replace(ON_CPU, dtype=torch.bfloat16)),
    "fp16": Latent(5, 40, 12, replace(ON_CPU, dtype=torch.float16)),
    "DeepSeek, 16 heads": Latent(16, 512, 64, replace(ON_CPU, page_size=64)),
    "window": Latent(2, 32, 16, replace(ON_CPU, window=7)),
    "tail": Latent(2, 32, 16, replace(ON_CPU, tail=3)),
    "rank 1 of 2": Latent(2, 32, 16, replace(ON_CPU, dcp_size=2, dcp_rank=1)),
    "rank 3 of 4": Latent(2, 32, 16, replace(ON_CPU, dcp_size=4, dcp_rank=3, interleave=16)),
}


@pytest.mark.parametrize("rows", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("latent", GEOMETRIES.values(), ids=GEOMETRIES)
def test_against_float64(latent: Latent, rows: list[Row]) -> None:
    check(run(rows, latent.with_options(device="cpu")))


def test_gathered_heads() -> None:
    """128 query heads on one latent, as with heads sharded over a group."""
    check(run([Row(33, 2, seed=1), Row(0, 3, prefill=True, seed=2)], Latent(128, 64, 16, ON_CPU)))


def test_chunks_of_a_long_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend_plan_cpu, "_MAX_ELEMENTS", 1)  # a chunk is a page
    attend_plan_cpu._plan.cache_clear()
    check(run([*MIXED, Row(150, 1, seed=70)], Latent(setting=ON_CPU)))
    attend_plan_cpu._plan.cache_clear()


def test_ranks_merge_to_the_whole() -> None:
    latent = Latent(setting=replace(ON_CPU, dcp_size=4, interleave=3))
    cases = [run(MIXED, replace(latent, setting=shard)) for shard in shards(latent.setting)]
    check(build(MIXED, latent.with_options(dcp_size=1)), *union(cases))


def test_pools_of_any_strides() -> None:
    """A pool cut out of one tensor of all layers, and one with entries outermost."""
    latent = Latent(setting=ON_CPU)
    wanted = run(MIXED, latent).args
    case = build(MIXED, latent)
    pool = case.args["pool"]
    for other in (
        torch.stack([pool * 2, pool], 1)[:, 1],
        pool.transpose(0, 1).contiguous().transpose(0, 1),
    ):
        assert not other.is_contiguous()
        ops.attend_latent(*(case.args | {"pool": other}).values())
        assert torch.equal(case.args["out"], wanted["out"])
        assert torch.equal(case.args["lse"], wanted["lse"])


def test_equals_attention_that_is_not_absorbed() -> None:
    """K and V of every head from the up-projections, in float64: what the latent form stands for.

    q = [q_nope @ W_UK, q_rope]; out @ W_UV. Absorbing adds two projections to the arithmetic, each
    of at most 48 terms below 8 in size.
    """
    heads, rank, nope, rope, value, length = 3, 48, 24, 16, 20, 37
    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(shape, dtype=torch.float64)  # noqa: E731
    q_nope, q_rope = draw(length, heads, nope), draw(length, heads, rope)
    w_uk, w_uv = draw(heads, nope, rank) / nope**0.5, draw(heads, rank, value) / rank**0.5
    compressed, rope_key = draw(length, rank), draw(length, rope)
    scale = (nope + rope) ** -0.5

    keys = torch.einsum("nr,hdr->nhd", compressed, w_uk)
    keys = torch.cat([keys, rope_key[:, None].expand(-1, heads, -1)], -1)
    values = torch.einsum("nr,hrv->nhv", compressed, w_uv)
    scores = scale * torch.einsum("thd,nhd->htn", torch.cat([q_nope, q_rope], -1), keys)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
    wanted = torch.einsum("htn,nhv->thv", weights, values)

    absorbed = torch.cat([torch.einsum("thd,hdr->thr", q_nope, w_uk), q_rope], -1)
    latents = torch.cat([compressed, rope_key], -1)
    got = torch.einsum("thr,hrv->thv", _through_pages(absorbed, latents, rank, scale), w_uv)
    torch.testing.assert_close(got, wanted, atol=48 * 8 * 2.0**-23, rtol=0)


def _through_pages(q: Tensor, latents: Tensor, value_dim: int, scale: float) -> Tensor:
    """The op's output for one prefill row of all tokens, in float64 for the arithmetic around."""
    case = build(
        [Row(0, len(q), prefill=True)],
        Latent(q.shape[1], value_dim, q.shape[2] - value_dim, ON_CPU),
    )
    a = case.args
    slots = [
        int(a["page_table"][a["slot_of_row"][0], c // 16]) * 16 + c % 16 for c in range(len(q))
    ]
    ops.latent_write(latents.float(), torch.tensor(slots), a["pool"])
    a |= {"q": q.float(), "scale": scale}
    ops.attend_latent(*a.values())
    return a["out"].double()


def test_contents_decide_not_addresses() -> None:
    """Static buffers keep their addresses while a replay changes what they hold."""
    case = run([Row(20, seed=1), Row(37, seed=2)], Latent(setting=ON_CPU))
    a = case.args
    a["visible_end"][0] -= 9
    a["pool"].nan_to_num_()
    a["page_table"][[0, 1], :2] = a["page_table"][[1, 0], :2].clone()
    ops.attend_latent(*a.values())
    check(case)


def test_nothing_to_see() -> None:
    """Every row empty: neither the page table nor the pool, all poison, is read."""
    rows = [Row(0, 4, tokens=0), Row(0, 7, tokens=0, prefill=True), Row(0, 0, padding=True)]
    case = run(rows, Latent(setting=replace(ON_CPU, tail=2)))
    check(case)
    assert (case.args["lse"] == -torch.inf).all()
