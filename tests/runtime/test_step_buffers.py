"""StepBuffers over memory of the caller: attention against a dense oracle, drafts, refusals."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import graphattn
from graphattn import AttentionLayer, Bounds, StepBuffers
from graphattn.errors import ConfigError, UnsupportedModelError
from graphattn.foreign import ForeignAttention
from graphattn.foreign.sdpa import SDPA
from tests.models.dense_step import DenseStep
from tests.runtime.tiny_model import TinyModel

HUGE = 2**30  # a page that no pool has
DIM = 12
LAYERS = (AttentionLayer(6, 2, DIM, scale=0.3), AttentionLayer(6, 2, DIM, scale=0.3, window=5))
BOUNDS = Bounds(max_batch=4, max_seq_len=40, max_tokens=20, page_size=4, num_pages=70)
CPU = torch.device("cpu")


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Caller:
    """Sequences with random q, k, v, and the caller's own memory: seven slots, pages in any order,
    a table that is a part of a wider one, pools laid out page, position, head. Nothing that is not
    a page's own content is harmless."""

    def __init__(
        self,
        seed: int,
        bounds: Bounds = BOUNDS,
        dcp: graphattn.DCP | None = None,
        kv_dtype: torch.dtype = torch.float32,
        attention: ForeignAttention | None = None,
    ) -> None:
        self.rng, torch_rng = random.Random(seed), torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=torch_rng).to(kv_dtype).float()

        slots = 7
        self.qkv = [
            [[normal(40, h, DIM) for h in (6, 2, 2)] for _ in LAYERS] for _ in range(slots)
        ]  # by slot, layer
        self.cached = [0] * slots
        self.page_table = torch.full((slots, 2, 13), HUGE, dtype=torch.int32)[:, 1]
        pages = torch.randperm(bounds.num_pages, generator=torch_rng).view(slots, 10)
        self.pages = pages.int()
        self.pools = None
        if dcp is None:
            raw = torch.full((len(LAYERS), 2, bounds.num_pages, 4, 2, DIM), float("nan")).to(
                kv_dtype
            )
            self.pools = [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in raw]
        self.buffers = StepBuffers.allocate(
            bounds,
            LAYERS,
            dtype=torch.float32,
            kv_dtype=kv_dtype,
            device="cpu",
            page_table=self.page_table,
            pools=self.pools,
            dcp=dcp,
            attention=attention,
        )

    def rows(self, tokens: int, longest: int) -> list[tuple[int, int]]:
        """(slot, places) of a random step; slots start again from time to time."""
        rows, left = [], tokens
        for slot in self.rng.sample(range(7), self.rng.randint(0, 4)):
            if self.rng.random() < 0.2:
                self.cached[slot] = 0
            places = min(self.rng.choice([1, 1, longest]), left, 40 - self.cached[slot])
            if places:
                rows.append((slot, places))
                left -= places
                needed = -(-(self.cached[slot] + places) // 4)  # without DCP; with it, fewer
                self.page_table[slot] = HUGE
                self.page_table[slot, :needed] = self.pages[slot, :needed]
        return rows

    def step(self, buffers: StepBuffers, rows: list[tuple[int, int]]) -> None:
        """Run one step and compare every place of both layers."""
        unused = (4 - len(rows)) * [(-1, 0)]
        slot, places = zip(*rows, *unused, strict=True)
        context = [self.cached[s] if s >= 0 else HUGE for s in slot]
        buffers.spoil()
        buffers.prepare_lengths(ints(*places), ints(*context), slot_of_row=ints(*slot))
        tokens = len(buffers.positions)
        for layer, spec in enumerate(LAYERS):
            packed = [torch.full((tokens, h, DIM), float("nan")) for h in (6, 2, 2)]
            for (s, n), at in zip(rows, self.places(rows), strict=True):
                for target, source in zip(packed, self.qkv[s][layer], strict=True):
                    target[at] = source[self.cached[s] : self.cached[s] + n]
            out = buffers.attend(layer, *packed)
            for (s, n), at in zip(rows, self.places(rows), strict=True):
                end = self.cached[s] + n
                dense = DenseStep(torch.zeros(end), LAYERS)
                want = dense.attend(layer, *(x[:end] for x in self.qkv[s][layer]))[-n:]
                assert buffers.positions[at].tolist() == list(range(end - n, end))
                torch.testing.assert_close(out[at], want, atol=self.budget(s, spec), rtol=0)
            assert not out[sum(n for _, n in rows) :].any(), "padding is exactly 0"
        for s, n in rows:
            self.cached[s] += n

    @staticmethod
    def places(rows: list[tuple[int, int]]) -> Iterator[slice]:
        start = 0
        for _, n in rows:
            yield slice(start, start + n)
            start += n

    def budget(self, slot: int, spec: AttentionLayer) -> float:
        """fp32 of scores of DIM products and of a softmax over 40 positions, doubled by the sum."""
        q, k, v = (x.abs().max() for x in self.qkv[slot][0])
        eps = torch.finfo(torch.float32).eps
        return float(2 * v * eps * (2 * DIM * spec.scale * DIM * q * k + 40))


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_come_and_go(seed: int) -> None:
    """Chunks beside decode rows, idle slots, re-used slots, steps of three bucket sizes."""
    caller = Caller(seed)
    decode = caller.buffers.narrow(3, mixed=False)
    small = caller.buffers.narrow(7)
    for _ in range(12):
        caller.step(caller.buffers, caller.rows(20, 9))
        caller.step(decode, caller.rows(3, 1))
        caller.step(small, caller.rows(7, 5))


def test_fp8_pages() -> None:
    """Of K and V that are FP8 numbers nothing is lost."""
    caller = Caller(5, kv_dtype=torch.float8_e4m3fn)
    for _ in range(12):
        caller.step(caller.buffers, caller.rows(20, 9))


def test_a_kernel_of_others() -> None:
    caller = Caller(6, attention=SDPA())
    for _ in range(6):
        caller.step(caller.buffers, caller.rows(20, 9))
    with pytest.raises(ConfigError, match="attention: wanted a graphattn"):
        allocate(attention=torch.nn.functional.scaled_dot_product_attention)


@pytest.mark.parametrize("size", [2, 3])
def test_a_sharded_cache(size: int) -> None:
    dcp = graphattn.DCP(graphattn.VirtualGroup(size), interleave=2)
    bounds = Bounds(4, 40, 20, page_size=4, num_pages=70, dcp_size=size, interleave=2)
    caller = Caller(size, bounds, dcp)
    for pool in caller.buffers.pools().values():
        pool.fill_(float("nan"))
    for _ in range(12):
        caller.step(caller.buffers, caller.rows(20, 9))
    caller.buffers.close()


def test_drafts_have_logits_at_every_place() -> None:
    bounds = Bounds(4, 40, 20, page_size=4, num_pages=70, max_drafts=2)
    buffers = StepBuffers.allocate(bounds, LAYERS, dtype=torch.float32, device="cpu")
    buffers.prepare_lengths(ints(3, 0, 9, 2), ints(5, 0, 0, 0), prefill=ints(0, 0, 0, 1))
    assert buffers.metadata.logits_start.tolist() == [0, 3, 3, 6, 8]
    assert buffers.metadata.logits_count.tolist() == [3, 0, 1, 1]
    assert buffers.logits_token.tolist() == [0, 1, 2, 11, 0, 0, 13, 0, 0, 0, 0, 0]


def test_slots_share_the_pages_of_a_prefix() -> None:
    """Slot 6 goes on behind the first two pages of slot 2, which nobody writes again."""
    caller = Caller(3)
    for layer in range(len(LAYERS)):
        for x, y in zip(caller.qkv[6][layer], caller.qkv[2][layer], strict=True):
            x[:8] = y[:8]
    caller.page_table[:, :10] = caller.pages
    caller.page_table[6, :2] = caller.pages[2, :2]
    caller.step(caller.buffers, [(2, 13)])
    caller.cached[6] = 8
    caller.step(caller.buffers, [(6, 5), (2, 1)])
    caller.step(caller.buffers, [(2, 1), (6, 1)])


def test_lengths_and_slot_state_give_the_same_step() -> None:
    """Slot state with history also gives the ids."""
    caller = Caller(0)
    caller.page_table[:, :10] = caller.pages
    by_length, by_slot = caller.buffers, caller.buffers.narrow(20)
    query_len, context, slot = ints(6, 1, 0, 1), ints(3, 8, 0, 5), ints(2, 6, -1, 0)
    by_length.prepare_lengths(query_len, context, slot_of_row=slot, prefill=ints(1, 0, 0, 0))
    want = {name: tensor.clone() for name, tensor in by_length.metadata.tensors().items()}
    values = [torch.randn(20, h, DIM) for h in (6, 2, 2)]
    for pool in by_length.pools().values():
        pool.zero_()
    out = by_length.attend(0, *values).clone()
    by_length.spoil()
    by_slot.prepare_slots(
        graphattn.StepRows(
            slot_of_row=slot,
            query_len=query_len,
            context_len=ints(5, 0, 3, 0, 0, 0, 8),
            seq_len=ints(6, 0, 9, 0, 0, 0, 9),
            prompt_len=ints(4, 0, 9, 0, 0, 0, 2),
            finish=ints(0, 4, 0, 4, 4, 4, 0),
            history=torch.arange(7 * 40, dtype=torch.int32).view(7, 40),
            draft_tokens=torch.zeros(7, 1, dtype=torch.int32),
            draft_count=torch.zeros(7, dtype=torch.int32),
            page_table=caller.page_table,
        )
    )
    got = by_slot.metadata.tensors()
    assert got.pop("input_ids").tolist()[:8] == [83, 84, 85, 86, 87, 88, 248, 5]
    assert not want.pop("input_ids").any()
    for name, tensor in got.items():
        assert torch.equal(tensor, want[name]), name
    assert torch.equal(by_slot.attend(0, *values), out)


def test_a_step_never_leaves_its_buffers() -> None:
    """Lengths that no step can hold are cut; slots and contexts that do not exist hold nothing."""
    caller = Caller(1)
    caller.page_table[:, :10] = caller.pages
    pools = [pool.clone() for pair in caller.pools or () for pool in pair]
    buffers = caller.buffers
    slots = ints(7, 2**31 - 1, -(2**31), 1)
    buffers.prepare_lengths(ints(2, 3, 4, HUGE), ints(0, 0, 0, 40), slot_of_row=slots)
    assert buffers.metadata.query_start.tolist() == [0, 2, 5, 9, 20]
    assert not buffers.metadata.token_count.any()
    out = buffers.attend(0, *(torch.ones(20, h, DIM) for h in (6, 2, 2)))
    assert not out.any()
    decode = buffers.narrow(3, mixed=False)
    decode.prepare_lengths(ints(0, 5, 1, 2), ints(0, 0, 0, 0), slot_of_row=ints(0, -1, -1, -1))
    assert decode.metadata.query_start.tolist() == [0, 0, 1, 2, 3]
    decode.prepare_lengths(ints(1, 1, 0, 0), ints(0, 0, 0, 0), prefill=ints(1, 1, 1, 1))
    assert decode.metadata.prefill_count.item() == 0, "nobody would attend for it"
    after = [pool for pair in caller.pools or () for pool in pair]
    assert all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(pools, after, strict=True))


def allocate(**changes: object) -> StepBuffers:
    arguments = {"dtype": torch.float32, "device": "cpu"} | changes
    return StepBuffers.allocate(
        arguments.pop("bounds", BOUNDS),  # type: ignore[arg-type]
        arguments.pop("layers", LAYERS),  # type: ignore[arg-type]
        **arguments,  # type: ignore[arg-type]
    )


POOL = torch.zeros(70, 2, 4, DIM)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.int8}, "dtype: wanted float32"),
        ({"kv_dtype": torch.float16}, "kv_dtype: wanted torch.float32 or torch.float8_e4m3fn"),
        ({"page_table": torch.zeros(4, 10)}, "page_table: wanted int32"),
        ({"page_table": torch.zeros(4, 9).int()}, "page_table: wanted at least 10 columns"),
        (
            {"page_table": torch.zeros(10, 4).int().T},
            "page_table: wanted a contiguous last dimension",
        ),
        ({"pools": [(POOL, POOL)]}, "pools: wanted one entry for each of 2 layers"),
        ({"pools": [(POOL, POOL), (POOL,)]}, r"pools\[1\]: wanted \(k, v\)"),
        (
            {"pools": 2 * [(POOL, POOL.half())]},
            r"pools\[0\]\[1\]: wanted float32",
        ),
        ({"pools": 2 * [(POOL[1:], POOL)]}, r"pools\[0\]\[0\]: wanted shape \[70, 2, 4, 12\]"),
        ({"dcp": graphattn.DCP(graphattn.VirtualGroup(2))}, "bounds.dcp_size, bounds.interleave"),
        ({"bounds": Bounds(4, 40, 20, 4, 70, dcp_size=2)}, "bounds.dcp_size, bounds.interleave"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_bad_memory_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        allocate(**changes)


def test_a_virtual_group_brings_its_own_pools() -> None:
    dcp = graphattn.DCP(graphattn.VirtualGroup(2))
    with pytest.raises(ConfigError, match="pools: wanted None with a VirtualGroup"):
        allocate(bounds=Bounds(4, 40, 20, 4, 70, dcp_size=2), dcp=dcp, pools=2 * [(POOL, POOL)])


@torch.no_grad()
def test_a_model_of_the_step_contract_runs_as_it_is() -> None:
    torch.manual_seed(0)
    model = TinyModel()
    bounds = Bounds(2, 32, 12, page_size=8, num_pages=8)
    buffers = StepBuffers.allocate(
        bounds, model.attention_layers, dtype=torch.float32, device="cpu"
    )
    buffers.page_table.copy_(torch.arange(8).view(2, 4))
    tokens = torch.randint(model.vocab_size, (2, 9))
    for context, places in ((0, 6), (6, 3)):
        buffers.prepare_lengths(ints(places, places), ints(context, context))
        buffers.input_ids[: 2 * places] = tokens[:, context : context + places].flatten()
        logits = model(buffers)[:2]
        for row, ids in enumerate(tokens[:, : context + places]):
            want = model.dense_logits(ids.tolist())[-1]
            assert torch.equal(logits[row].argsort()[-5:], want.argsort()[-5:])


def test_bad_geometry_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="5 query heads on 2 KV heads"):
        allocate(layers=[AttentionLayer(5, 2, DIM, scale=1.0)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_len": ints(1, 1, 1)}, r"query_len: wanted shape \[4\]"),
        ({"query_len": ints(1, 1, 1, 1).long()}, "query_len: wanted int32"),
        ({"context_len": [0, 0, 0, 0]}, "context_len: wanted a tensor"),
        ({"prefill": torch.zeros(8).int()[::2]}, "prefill: wanted contiguous memory"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_bad_lengths_are_refused(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"query_len": ints(1, 0, 0, 0), "context_len": ints(0, 0, 0, 0)}
    with pytest.raises(ConfigError, match=message):
        allocate().prepare_lengths(**(arguments | changes))  # type: ignore[arg-type]


def test_rows_need_slots() -> None:
    buffers = allocate(page_table=torch.zeros(3, 10).int())
    with pytest.raises(ConfigError, match="slot_of_row: wanted a tensor"):
        buffers.prepare_lengths(ints(1, 0, 0, 0), ints(0, 0, 0, 0))


def test_a_step_is_prepared_by_the_buffers_that_attend() -> None:
    buffers = allocate()
    small = buffers.narrow(4)
    values = [torch.zeros(20, h, DIM) for h in (6, 2, 2)]
    message = "attend: wanted buffers that were prepared for this step"
    with pytest.raises(ConfigError, match=message):
        buffers.attend(0, *values)
    small.prepare_lengths(ints(1, 0, 0, 0), ints(0, 0, 0, 0))
    with pytest.raises(ConfigError, match=message):
        buffers.attend(0, *values)
    small.attend(0, *(x[:4] for x in values))


def test_bad_steps_and_values_are_refused() -> None:
    buffers = allocate()
    buffers.prepare_lengths(ints(1, 0, 0, 0), ints(0, 0, 0, 0))
    q, k = torch.zeros(20, 6, DIM), torch.zeros(20, 2, DIM)
    for tokens in (0, 21, True):
        with pytest.raises(ConfigError, match=r"tokens: wanted an integer in 1\.\.20"):
            buffers.narrow(tokens)
    for layer in (2, -1):
        with pytest.raises(ConfigError, match=r"layer: wanted an index in 0\.\.1"):
            buffers.attend(layer, q, k, k)
    with pytest.raises(ConfigError, match=r"q: wanted shape \[20, 6, 12\]"):
        buffers.attend(0, q[:19], k, k)
    with pytest.raises(ConfigError, match=r"k: wanted float32"):
        buffers.attend(0, q, k.half(), k)
    with pytest.raises(ConfigError, match=r"v: wanted a contiguous last dimension"):
        buffers.attend(0, q, k, torch.zeros(20, DIM, 2).transpose(1, 2))
    with pytest.raises(UnsupportedModelError, match="not latent"):
        buffers.attend_latent(0, q, torch.zeros(20, DIM))
    with pytest.raises(ConfigError, match="page_table: wanted the page table of these buffers"):
        buffers.prepare_slots(allocate()._shared.rows)
    rows = replace(buffers._shared.rows, history=torch.zeros(4, 39).int())
    with pytest.raises(ConfigError, match=r"rows.history: wanted shape \[4, 40\]"):
        buffers.prepare_slots(rows)


def test_the_operations_alone_attend_alike() -> None:
    """What `buffers.work` reads is what `buffers.attend` reads, window and all."""
    caller = Caller(3)
    caller.step(caller.buffers, caller.rows(20, 9))
    buffers = caller.buffers
    for layer, spec in enumerate(LAYERS):
        q, (k, v), pools = torch.randn(20, 6, DIM), torch.randn(2, 20, 2, DIM), caller.pools[layer]
        before = [pool.clone() for pool in pools]
        wanted = buffers.attend(layer, q, k, v).clone()
        written = [pool.clone() for pool in pools]
        for pool, old in zip(pools, before, strict=True):
            pool.copy_(old)
        work = buffers.work(layer)
        out, lse = torch.full_like(wanted, torch.nan), torch.zeros(20, 6)
        partials = graphattn.ops.Partials.allocate(work, 6, DIM)
        graphattn.ops.kv_write(k, v, buffers.metadata.kv_slot, *pools)
        graphattn.ops.attend(q, *pools, work, partials, out, lse, scale=spec.scale)
        assert torch.equal(out, wanted)
        assert wanted.any()
        for pool, want in zip(pools, written, strict=True):
            torch.testing.assert_close(pool, want, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(ConfigError, match=r"^layer: wanted an index in 0..1, got 2"):
        buffers.work(2)
