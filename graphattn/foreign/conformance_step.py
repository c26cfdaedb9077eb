"""Steps of the conformance test: metadata as the runtime derives it, KV entries, and the oracle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from graphattn.bounds import Bounds, ceil_div
from graphattn.kernels.attend_latent_ref import attend_latent_ref
from graphattn.kernels.attend_ref import attend_ref
from graphattn.metadata import StepMetadata, StepRows, WorkShape
from graphattn.models.contract import AttentionLayer
from graphattn.state import Finish
from graphattn.work import AttentionWork

Hazard = Literal["none", "entries", "table"]

NOWHERE = 10**6  # a page id: reading it is far outside the pools here
LONGEST = 64  # tokens of a row, context and step
MAX_SPLITS = 4


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a step: `context` tokens are cached, then come `places` query places."""

    context: int = 0
    places: int = 1
    tokens: int | None = None  # places that hold a token; None: all. With 0 its slot has ended
    prefill: bool = False
    padding: bool = False  # slot -1, no places

    @property
    def existing(self) -> int:
        """Places with a token."""
        return 0 if self.padding else self.places if self.tokens is None else self.tokens


@dataclass(frozen=True, slots=True)
class Scenario:
    """A step and the options of its layer."""

    name: str
    rows: tuple[Row, ...]
    tail: int = 0  # token places past the last row
    drafts: int = 0  # k: decode rows have up to 1 + k places
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    latent: bool = False
    shard: tuple[int, int, int] = (1, 0, 1)  # DCP size, rank, interleave
    replayed: bool = False

    def __str__(self) -> str:
        return self.name

    def later(self) -> Scenario:
        """A later step of the same shapes: other lengths, other pages."""
        rows = tuple(replace(row, context=(row.context * 7 + 11) % 40) for row in self.rows[::-1])
        return replace(self, rows=rows)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of the layers that a kernel is tested with."""

    num_q_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    value_dim: int = 12  # of a latent layer
    page_size: int = 8
    dtype: torch.dtype = torch.float32
    device: str = "cpu"


class Budget(NamedTuple):
    """Largest allowed errors."""

    out: float
    out_relative: float
    lse: float


@dataclass(frozen=True, slots=True)
class Step:
    """Arguments of one call."""

    scenario: Scenario
    q: Tensor
    pools: tuple[Tensor, ...]
    work: AttentionWork
    layer: AttentionLayer
    out: Tensor
    lse: Tensor

    def inputs(self) -> dict[str, Tensor]:
        """What a call reads, by name."""
        named = {f"pool {i}": pool for i, pool in enumerate(self.pools)}
        tensors = ((f"work.{f.name}", getattr(self.work, f.name)) for f in fields(self.work))
        return {"q": self.q, **named} | {n: t for n, t in tensors if isinstance(t, Tensor)}

    def empty(self) -> Tensor:
        """[T] bool, on the host: token places that see nothing."""
        return (self.work.visible_end <= self.work.visible_start).to("cpu")

    def oracle(self) -> tuple[Tensor, Tensor]:
        """Exact out and LSE (natural logarithm), float64."""
        w = self.work
        rows = (w.page_table, w.slot_of_row, w.query_start, w.visible_start, w.visible_end)
        scale = self.layer.scale
        if self.layer.value_dim:
            value_dim = self.layer.value_dim
            return attend_latent_ref(self.q, self.pools[0], *rows, value_dim=value_dim, scale=scale)
        keys, values = self.pools
        softcap, sinks = self.layer.softcap, self.layer.sinks
        return attend_ref(self.q, keys, values, *rows, scale=scale, softcap=softcap, sinks=sinks)

    def budget(self) -> Budget:
        """From the arithmetic: a score is a dot of D products, which a kernel may round to the
        dtype before the softmax, as it may the weights; an error e of a score moves the LSE by e
        and the output by 2 e max|v|; a sum over N positions adds N roundings of fp32."""
        eps, eps32 = torch.finfo(self.q.dtype).eps, torch.finfo(torch.float32).eps
        q, k = (float(x.double().norm(dim=-1).max()) for x in (self.q, self.pools[0]))
        score = self.layer.scale * q * k + self.layer.softcap
        wide = (self.q.shape[2] + 16) * eps32 * score + (LONGEST + 16) * eps32
        narrow = 0.0 if self.q.dtype == torch.float32 else 2 * eps * score
        lse = wide + narrow
        largest = float(self.pools[-1].double().abs().max())
        return Budget((2 * lse + (eps if narrow else 0.0)) * largest, eps, lse)


def build(scenario: Scenario, geometry: Geometry, hazard: Hazard = "none") -> Step:
    """The call of a scenario. What no token sees is 0, or NaN ("entries"); columns that no token
    sees name page 0, which is nobody's, or, on a CPU, no page at all ("table")."""
    bounds = _bounds(scenario, geometry)
    layer = _layer(scenario, geometry)
    shape = WorkShape(
        (scenario.window,), align=16, chunk=16, max_splits=MAX_SPLITS, prefill_block=4
    )
    tokens = sum(row.places for row in scenario.rows if not row.padding) + scenario.tail
    device = torch.device(geometry.device)
    rows = _step_rows(scenario, bounds, device)
    metadata = StepMetadata.allocate(bounds, shape, tokens, device)
    metadata.prepare(rows, bounds, shape)
    work = _work(rows, metadata, bounds, shape)
    pools = _pools(scenario, layer, geometry, bounds, work, hazard)
    _hide_columns(work, geometry, "table" if hazard == "table" and device.type == "cpu" else "none")
    q = _noise(1, tokens, layer.num_q_heads, layer.head_dim, like=geometry)
    return Step(
        scenario,
        q,
        tuple(pool.squeeze(1) for pool in pools) if scenario.latent else pools,
        work,
        layer,
        out=q.new_zeros(tokens, layer.num_q_heads, layer.out_dim),
        lse=q.new_zeros(tokens, layer.num_q_heads, dtype=torch.float32),
    )


def _bounds(scenario: Scenario, geometry: Geometry) -> Bounds:
    size, rank, interleave = scenario.shard
    batch = len(scenario.rows)
    columns = ceil_div(LONGEST, geometry.page_size)
    return Bounds(
        max_batch=batch,
        max_seq_len=LONGEST,
        max_tokens=batch * LONGEST,
        page_size=geometry.page_size,
        num_pages=1 + batch * columns,
        vocab_size=1,
        max_drafts=scenario.drafts,
        dcp_size=size,
        dcp_rank=rank,
        interleave=interleave,
    )


def _layer(scenario: Scenario, geometry: Geometry) -> AttentionLayer:
    heads = geometry.num_q_heads
    return AttentionLayer(
        heads,
        1 if scenario.latent else geometry.num_kv_heads,
        geometry.head_dim,
        scale=1 / math.sqrt(geometry.head_dim),
        softcap=scenario.softcap,
        window=scenario.window,
        sinks=_noise(2, heads, like=geometry).float() if scenario.sinks else None,
        value_dim=geometry.value_dim if scenario.latent else 0,
    )


def _step_rows(scenario: Scenario, bounds: Bounds, device: torch.device) -> StepRows:
    """Row r has the slot B - 1 - r, and pages in an order of their own; page 0 is nobody's."""
    rows, B = scenario.rows, len(scenario.rows)

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    by_slot = rows[::-1]
    generator = torch.Generator().manual_seed(sum(row.context for row in rows))
    pages = torch.randperm(B * bounds.pages_per_seq, generator=generator) + 1
    return StepRows(
        slot_of_row=ints([-1 if row.padding else B - 1 - r for r, row in enumerate(rows)]),
        query_len=ints([0 if row.padding else row.places for row in rows]),
        context_len=ints([row.context for row in by_slot]),
        seq_len=ints([row.context + row.existing for row in by_slot]),
        prompt_len=ints([row.context + row.existing if row.prefill else 0 for row in by_slot]),
        finish=ints([Finish.RUNNING if row.existing else Finish.STOP for row in by_slot]),
        history=torch.zeros(B, bounds.max_seq_len, dtype=torch.int32, device=device),
        draft_tokens=torch.zeros(B, max(bounds.max_drafts, 1), dtype=torch.int32, device=device),
        draft_count=ints([0] * B),
        page_table=pages.view(B, -1).to(device=device, dtype=torch.int32),
    )


def _work(rows: StepRows, step: StepMetadata, bounds: Bounds, shape: WorkShape) -> AttentionWork:
    return AttentionWork(
        page_table=rows.page_table,
        slot_of_row=rows.slot_of_row,
        query_start=step.query_start,
        visible_start=step.visible_start[0],
        visible_end=step.visible_end,
        row_begin=step.row_begin[0],
        row_end=step.row_end,
        row_chunk=step.row_chunk[0],
        row_splits=step.row_splits[0],
        decode_items=step.decode_items[0],
        decode_count=step.decode_count[:1],
        prefill_items=step.prefill_items if _has_prefill(step) else None,
        prefill_count=step.prefill_count if _has_prefill(step) else None,
        decode_query_len=bounds.decode_query_len,
        prefill_block=shape.prefill_block,
    )


def _has_prefill(step: StepMetadata) -> bool:
    return bool(step.prefill_count.any())


def _seen(work: AttentionWork) -> dict[int, range]:
    """Local positions that some token of a slot sees."""
    starts, slots = work.query_start.tolist(), work.slot_of_row.tolist()
    low, high = work.visible_start.tolist(), work.visible_end.tolist()
    seen = {}
    for row, slot in enumerate(slots):
        ranges = [
            (low[t], high[t]) for t in range(starts[row], starts[row + 1]) if low[t] < high[t]
        ]
        if ranges:
            seen[slot] = range(min(a for a, _ in ranges), max(b for _, b in ranges))
    return seen


def _pools(
    scenario: Scenario,
    layer: AttentionLayer,
    geometry: Geometry,
    bounds: Bounds,
    work: AttentionWork,
    hazard: Hazard,
) -> tuple[Tensor, ...]:
    """Noise where a token sees it, 0 or NaN elsewhere: K and V, or latents."""
    page_size = geometry.page_size
    shape = (bounds.num_pages, layer.num_kv_heads, page_size, layer.head_dim)
    held = torch.zeros(bounds.num_pages, page_size, dtype=torch.bool)
    table = work.page_table.tolist()
    for slot, positions in _seen(work).items():
        for c in positions:
            held[table[slot][c // page_size], c % page_size] = True
    other = torch.nan if hazard == "entries" else 0.0
    return tuple(
        torch.where(
            held.to(geometry.device)[:, None, :, None], _noise(seed, *shape, like=geometry), other
        )
        for seed in ((3,) if scenario.latent else (3, 4))
    )


def _hide_columns(work: AttentionWork, geometry: Geometry, hazard: Hazard) -> None:
    """Rewrite the page-table entries that nobody needs."""
    seen, page_size = _seen(work), geometry.page_size
    for slot in range(work.page_table.shape[0]):
        needed = {c // page_size for c in seen.get(slot, range(0))}
        for column in set(range(work.page_table.shape[1])) - needed:
            work.page_table[slot, column] = NOWHERE if hazard == "table" else 0


def _noise(seed: int, *shape: int, like: Geometry) -> Tensor:
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return noise.to(device=like.device, dtype=like.dtype)
