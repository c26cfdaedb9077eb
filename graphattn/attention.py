"""attend(): write KV, then attention over the visible ranges of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphattn.bounds import Bounds
from graphattn.dcp import ContextParallel
from graphattn.errors import UnsupportedModelError
from graphattn.kernels import ops
from graphattn.kernels.tiles import MAX_HEAD_DIM, arch_of, attention_tiles
from graphattn.metadata import StepBuffers, WorkShape, window_groups
from graphattn.models.contract import AttentionLayer
from graphattn.pages import KVPools

MAX_SPLITS = 32  # of a decode row; bounds the partials whatever the context length


def work_shape(
    layers: Sequence[AttentionLayer],
    *,
    page_size: int,
    decode_query_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> WorkShape:
    """One cut of the work for all layers: the coarsest chunk, the smallest query block."""
    geometries = {(x.head_dim, x.num_q_heads // x.num_kv_heads) for x in layers}
    tiles = [
        attention_tiles(
            arch_of(device),
            head_dim=head_dim,
            group=group,
            decode_query_len=decode_query_len,
            page_size=page_size,
            dtype=dtype,
        )
        for head_dim, group in sorted(geometries)
    ]
    return WorkShape(
        windows=window_groups([x.window for x in layers])[0],
        align=max(t.align for t in tiles),
        chunk=max(t.chunk for t in tiles),
        max_splits=MAX_SPLITS,
        prefill_block=min(t.prefill_block for t in tiles),
    )


def check_layers(layers: Sequence[AttentionLayer]) -> None:
    """Raise `UnsupportedModelError` for a geometry that the kernels do not cover."""
    if not layers:
        raise UnsupportedModelError("the model has no attention layer: nothing to serve")
    for i, x in enumerate(layers):
        if x.num_q_heads % x.num_kv_heads or not 1 <= x.num_q_heads // x.num_kv_heads <= 16:
            raise UnsupportedModelError(
                f"layer {i}: {x.num_q_heads} query heads on {x.num_kv_heads} KV heads; "
                "supported are 1 to 16 query heads per KV head"
            )
        if not 1 <= x.head_dim <= MAX_HEAD_DIM:
            raise UnsupportedModelError(
                f"layer {i}: head size {x.head_dim}; supported: 1 to {MAX_HEAD_DIM}"
            )


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory that attention layers use one after the other. Fixed size, never regrown."""

    partial_out: Tensor  # [B * S * Q * Hq * D] fp32: unmerged outputs of splits
    partial_lse: Tensor  # [B * S * Q * Hq] fp32
    out: Tensor  # [T * Hq * D] in the KV dtype
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
        width = max(x.num_q_heads * x.head_dim for x in layers)
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
    buffers: StepBuffers
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

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        steps: Sequence[StepBuffers],
        *,
        mixed: bool,
    ) -> Tensor:
        """See `ModelStep.attend`. `steps` has the metadata of each shard, `mixed` says whether the
        step can hold prefill rows."""
        sinks, parallel = self.layers[layer].sinks, self.parallel
        if parallel is None:
            return self._attend(self.shards[0], layer, q, k, v, steps[0], sinks, mixed)[0]
        sharded = parallel.heads_sharded(q, self.layers[layer])
        whole = parallel.gather(q) if sharded else q
        parts = [
            self._attend(shard, layer, whole, k, v, step, None, mixed)
            for shard, step in zip(self.shards, steps, strict=True)
        ]
        outs, lses = zip(*parts, strict=True)
        return parallel.combine(outs, lses, sinks, sharded=sharded)

    def _attend(
        self,
        shard: Shard,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: StepBuffers,
        sinks: Tensor | None,
        mixed: bool,
    ) -> tuple[Tensor, Tensor]:
        """Attention over one shard: out [T, Hq, D] and lse [T, Hq]."""
        spec, work, bounds = self.layers[layer], shard.workspace, shard.bounds
        group = self.shape.windows.index(spec.window)
        keys, values = shard.pools.keys[layer], shard.pools.values[layer]
        ops.kv_write(k, v, step.kv_slot, keys, values)
        tokens, heads, dim = q.shape
        places = (bounds.max_batch, self.shape.max_splits, bounds.decode_query_len, heads)
        num_places = math.prod(places)
        out = work.out[: tokens * heads * dim].view(tokens, heads, dim)
        lse = work.lse[: tokens * heads].view(tokens, heads)
        ops.attend(
            q,
            keys,
            values,
            self.page_table,
            self.slot_of_row,
            step.query_start,
            step.visible_start[group],
            step.visible_end,
            step.row_begin[group],
            step.row_end,
            step.row_chunk[group],
            step.row_splits[group],
            step.decode_items[group],
            step.decode_count[group : group + 1],
            step.prefill_items if mixed else None,
            step.prefill_count if mixed else None,
            sinks,
            work.partial_out[: num_places * dim].view(*places, dim),
            work.partial_lse[:num_places].view(places),
            out,
            lse,
            spec.scale,
            spec.softcap,
            bounds.decode_query_len,
            self.shape.prefill_block,
        )
        return out, lse
