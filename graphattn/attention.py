"""attend(): write KV, then attention over the visible ranges of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from graphattn.arguments import FP8
from graphattn.bounds import Bounds
from graphattn.dcp import ContextParallel
from graphattn.epoch import Epoch
from graphattn.errors import UnsupportedModelError
from graphattn.foreign.calling import attend_by
from graphattn.foreign.contract import ForeignAttention
from graphattn.kernels import ops
from graphattn.kernels.tiles import AttentionTiles, arch_of, attention_tiles, latent_tiles
from graphattn.metadata import StepMetadata, WorkShape, window_groups
from graphattn.models.contract import AttentionLayer, LowRank, Rotation
from graphattn.pages import KVPools
from graphattn.work import AttentionWork, in_schema_order

MAX_SPLITS = 32  # of a decode row; bounds the partials whatever the context length

# Pools of a layer on one rank, K and V or latents, and the scales of FP8 ones.
LayerPools = tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]
# Writes what the tokens of a step leave, given where, the pools of a layer and their scales.
Write = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor | None]], None]


def work_shape(
    layers: Sequence[AttentionLayer],
    *,
    page_size: int,
    decode_query_len: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
) -> WorkShape:
    """One cut of the work for all layers: the coarsest chunk, the smallest query block."""
    arch = arch_of(device)
    tiles = [
        layer_tiles(
            x,
            arch,
            page_size=page_size,
            decode_query_len=decode_query_len,
            dtype=dtype,
            kv_dtype=kv_dtype,
        )
        for x in layers
    ]
    return WorkShape(
        windows=window_groups([x.window for x in layers])[0],
        align=max(t.align for t in tiles),
        chunk=max(t.chunk for t in tiles),
        max_splits=MAX_SPLITS,
        prefill_block=min(t.prefill_block for t in tiles),
    )


def layer_tiles(
    layer: AttentionLayer,
    arch: str,
    *,
    page_size: int,
    decode_query_len: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
) -> AttentionTiles:
    """Tiles of one layer on an architecture; see `kernels/tiles.py`."""
    if layer.value_dim:
        return latent_tiles(
            arch,
            head_dim=layer.head_dim,
            value_dim=layer.value_dim,
            heads=layer.num_q_heads,
            decode_query_len=decode_query_len,
            page_size=page_size,
            dtype=dtype,
            kv_dtype=kv_dtype,
        )
    return attention_tiles(
        arch,
        head_dim=layer.head_dim,
        group=layer.num_q_heads // layer.num_kv_heads,
        decode_query_len=decode_query_len,
        page_size=page_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )


def partial_traffic(
    layer: AttentionLayer, chunk: int, decode_query_len: int, kv_dtype: torch.dtype
) -> float:
    """Bytes of partials over bytes of KV of a split decode row, at the smallest split.

    A split reads `chunk` entries once; its partials, fp32 with their LSE, are written and read
    once each.
    """
    partials = 2 * 4 * decode_query_len * layer.num_q_heads * (layer.out_dim + 1)
    return partials / (chunk * layer.entry_values * kv_dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory that attention layers use one after the other. Fixed size, never regrown."""

    partial_out: Tensor  # [B * S * Q * Hq * Dv] fp32: unmerged outputs of splits
    partial_lse: Tensor  # [B * S * Q * Hq] fp32
    out: Tensor  # [T * Hq * Dv] in the dtype of the queries
    lse: Tensor  # [T * Hq] fp32

    @staticmethod
    def allocate(
        layers: Sequence[AttentionLayer],
        bounds: Bounds,
        shape: WorkShape,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Workspace:
        """Sized by the bounds alone: independent of max_seq_len and of the pool."""
        heads = max(x.num_q_heads for x in layers)
        width = max(x.num_q_heads * x.out_dim for x in layers)
        splits = bounds.max_batch * shape.max_splits * bounds.decode_query_len

        def floats(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.float32, device=device)

        return Workspace(
            partial_out=floats(splits * width),
            partial_lse=floats(splits * heads),
            out=torch.zeros(bounds.max_tokens * width, dtype=dtype, device=device),
            lse=floats(bounds.max_tokens * heads),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Every buffer by name."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Shard:
    """What one DCP rank has of its own: metadata of its share, pages, workspace."""

    bounds: Bounds  # with this rank's `dcp_rank`
    buffers: StepMetadata
    pools: KVPools
    workspace: Workspace


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of all layers of one model over the pages of this process's ranks."""

    layers: tuple[AttentionLayer, ...]
    shape: WorkShape
    page_table: Tensor  # [B, pages_per_seq]; the same page ids serve every rank
    slot_of_row: Tensor  # [B]
    shards: tuple[Shard, ...]
    parallel: ContextParallel | None
    kernel: ForeignAttention | None  # that attends in our kernels' place
    epoch: Epoch  # in debug mode, that of the metadata which may be read

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        steps: Sequence[StepMetadata],
        *,
        mixed: bool,
    ) -> Tensor:
        """See `ModelStep.attend`. `steps` has the metadata of each shard, `mixed` says whether the
        step can hold prefill rows."""

        def write(place: Tensor, pools: Sequence[Tensor], scales: Sequence[Tensor | None]) -> None:
            ops.kv_write(k, v, place, *pools, *scales)

        return self._over_ranks(layer, q, write, steps, mixed=mixed)

    def attend_rotated(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotation: Rotation,
        steps: Sequence[StepMetadata],
        *,
        mixed: bool,
    ) -> Tensor:
        """See `ModelStep.attend_rotated`; `steps` and `mixed` as of `attend`."""
        rotated = torch.empty(q.shape, dtype=q.dtype, device=q.device)

        def write(place: Tensor, pools: Sequence[Tensor], scales: Sequence[Tensor | None]) -> None:
            rotation.write(q, k, v, place, rotated, *pools, *scales)

        return self._over_ranks(layer, rotated, write, steps, mixed=mixed)

    def attend_latent(
        self, layer: int, q: Tensor, latent: Tensor, steps: Sequence[StepMetadata], *, mixed: bool
    ) -> Tensor:
        """See `ModelStep.attend_latent`; `steps` and `mixed` as of `attend`."""
        dim = self.layers[layer].value_dim

        def write(place: Tensor, pools: Sequence[Tensor], scales: Sequence[Tensor | None]) -> None:
            ops.latent_write(latent, place, *pools, *scales, dim)

        return self._over_ranks(layer, q, write, steps, mixed=mixed, latent=True)

    def write_latent(
        self,
        layer: int,
        latent: Tensor,
        rotation: Rotation,
        query: LowRank | None,
        steps: Sequence[StepMetadata],
    ) -> None:
        """See `ModelStep.write_latent`; `steps` as of `attend`."""
        for shard, step in zip(self.shards, steps, strict=True):
            (pool, *_), (scale, *_) = self._pools(shard, layer)
            rotation.write_latent(latent, step.kv_slot, pool, scale, query)
            query = None  # is normed

    def attend_written(
        self, layer: int, q: Tensor, up: Tensor, steps: Sequence[StepMetadata], *, mixed: bool
    ) -> Tensor:
        """See `ModelStep.attend_written`; `steps` and `mixed` as of `attend`."""
        values = q.new_empty(len(q), *up.shape[:2])
        if self.parallel is None and not self._foreign(mixed):  # as the splits are merged
            self._attend(self.shards[0], layer, q, steps[0], None, mixed, (up, values))
            return values
        averages = self._over_ranks(layer, q, None, steps, mixed=mixed, latent=True)
        out = values.transpose(0, 1)
        torch.bmm(averages.transpose(0, 1), up.transpose(1, 2), out=out)
        return values

    def _over_ranks(
        self,
        layer: int,
        q: Tensor,
        write: Write | None,
        steps: Sequence[StepMetadata],
        *,
        mixed: bool,
        latent: bool = False,
    ) -> Tensor:
        """Write on every rank, if that is to be done, then attention over their shards. `write` may
        also finish `q`."""
        spec = self.layers[layer]
        if latent != bool(spec.value_dim):
            kind, call = ("latent", "attend_latent") if spec.value_dim else ("not latent", "attend")
            raise UnsupportedModelError(f"layer {layer} is {kind}: its model calls {call}")
        for shard, step in zip(self.shards, steps, strict=True):
            if write is not None:
                write(step.kv_slot, *self._pools(shard, layer))
        if self.parallel is None:
            return self._attend(self.shards[0], layer, q, steps[0], spec.sinks, mixed)[0]
        sharded = self.parallel.heads_sharded(q, spec)
        whole = self.parallel.gather(q) if sharded else q
        parts = [
            self._attend(shard, layer, whole, step, None, mixed)
            for shard, step in zip(self.shards, steps, strict=True)
        ]
        outs, lses = zip(*parts, strict=True)
        return self.parallel.combine(outs, lses, spec.sinks, sharded=sharded)

    def _foreign(self, mixed: bool) -> bool:
        """Whether a kernel of others attends in such a step."""
        return self.kernel is not None and (self.kernel.capabilities.prefill or not mixed)

    def _pools(self, shard: Shard, layer: int) -> LayerPools:
        spec = self.layers[layer]
        keys, values = shard.pools.keys[layer], shard.pools.values[layer]
        fp8 = keys.dtype == FP8
        if values is None:
            return (keys.squeeze(1),), (spec.latent_scale if fp8 else None,)
        return (keys, values), ((spec.k_scale, spec.v_scale) if fp8 else (None, None))

    def work(self, layer: int, step: StepMetadata, *, mixed: bool) -> AttentionWork:
        """What attention of a layer reads of a step, on the rank that `step` is of."""
        group = self.shape.windows.index(self.layers[layer].window)
        return AttentionWork(
            page_table=self.page_table,
            slot_of_row=self.slot_of_row,
            query_start=step.query_start,
            visible_start=step.visible_start[group],
            visible_end=step.visible_end,
            row_begin=step.row_begin[group],
            row_end=step.row_end,
            row_chunk=step.row_chunk[group],
            row_splits=step.row_splits[group],
            decode_items=step.decode_items[group],
            decode_count=step.decode_count[group : group + 1],
            prefill_items=step.prefill_items if mixed else None,
            prefill_count=step.prefill_count if mixed else None,
            decode_query_len=self.shards[0].bounds.decode_query_len,
            prefill_block=self.shape.prefill_block,
        )

    def _attend(
        self,
        shard: Shard,
        layer: int,
        q: Tensor,
        step: StepMetadata,
        sinks: Tensor | None,
        mixed: bool,
        expansion: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention over one shard: out [T, Hq, Dv] and lse [T, Hq], which with an `expansion` of
        latents, W_UV and the result, say nothing."""
        spec, space = self.layers[layer], shard.workspace
        work = self.work(layer, step, mixed=mixed)
        self.epoch.check(layer, {"kv_slot": step.kv_slot} | work.derived())
        (tokens, heads, _), dim = q.shape, spec.out_dim
        places = (shard.bounds.max_batch, self.shape.max_splits, work.decode_query_len, heads)
        num_places = math.prod(places)
        out = space.out[: tokens * heads * dim].view(tokens, heads, dim)
        lse = space.lse[: tokens * heads].view(tokens, heads)
        rows = in_schema_order(work)
        results = (
            space.partial_out[: num_places * dim].view(*places, dim),
            space.partial_lse[:num_places].view(places),
            out,
            lse,
        )
        limits = (work.decode_query_len, work.prefill_block)
        pools, scales = self._pools(shard, layer)
        if self.kernel is not None and self._foreign(mixed):
            values = None if spec.value_dim else pools[1]
            attend_by(self.kernel, q, pools[0], values, work, replace(spec, sinks=sinks), out, lse)
        elif spec.value_dim:
            options = (spec.scale, *limits, *scales, *(expansion or ()))
            ops.attend_latent(q, *pools, *rows, *results, *options)
        else:
            options = (spec.scale, spec.softcap, *limits, *scales)
            ops.attend(q, *pools, *rows, sinks, *results, *options)
        return out, lse
