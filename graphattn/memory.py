"""Every device tensor of an engine, allocated once from its bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from graphattn.attention import Attention, Shard, Workspace, partial_traffic, work_shape
from graphattn.bounds import Bounds
from graphattn.dcp import ContextParallel, Reduce
from graphattn.epoch import UNCHECKED, Epoch
from graphattn.foreign.contract import ForeignAttention
from graphattn.groups import Group
from graphattn.inputs import InputBlock
from graphattn.metadata import StepMetadata, StepRows
from graphattn.models.contract import AttentionLayer, StepModel, slot_tensors
from graphattn.pages import KVPools
from graphattn.ring import OutputBlock
from graphattn.sample import Sampler
from graphattn.slots import SlotMemory
from graphattn.state import SlotState


class ModelMemory:
    """What one model has of its own: for each rank of this process metadata, pages, workspace.

    The page table is shared: models of one engine use the same page ids in pools of their own.
    `pools`, of the only rank, may be a caller's.
    """

    def __init__(
        self,
        layers: tuple[AttentionLayer, ...],
        bounds: Bounds,
        page_table: Tensor,
        slot_of_row: Tensor,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        group: Group | None,
        reduce: Reduce,
        pools: KVPools | None = None,
        kernel: ForeignAttention | None = None,
        epoch: Epoch = UNCHECKED,
    ) -> None:
        """`dtype`: of queries and outputs. `kv_dtype`: of the pages; None is `dtype`. `kernel`
        attends in our kernels' place."""
        device = page_table.device
        held = kv_dtype or dtype
        self.bounds = bounds
        self.shape = work_shape(
            layers,
            page_size=bounds.page_size,
            decode_query_len=bounds.decode_query_len,
            dtype=dtype,
            kv_dtype=held,
            device=device,
        )
        parallel = (
            None
            if group is None
            else ContextParallel(group, reduce, layers, bounds.max_tokens, dtype, device)
        )
        self.shards = tuple(
            self._shard(layers, replace(bounds, dcp_rank=rank), dtype, held, device, pools)
            for rank in ((0,) if group is None else group.ranks)
        )
        self.attention = Attention(
            layers=layers,
            shape=self.shape,
            page_table=page_table,
            slot_of_row=slot_of_row,
            shards=self.shards,
            parallel=parallel,
            kernel=kernel,
            epoch=epoch,
        )

    def _shard(
        self,
        layers: tuple[AttentionLayer, ...],
        bounds: Bounds,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
        pools: KVPools | None,
    ) -> Shard:
        return Shard(
            bounds=bounds,
            buffers=StepMetadata.allocate(bounds, self.shape, bounds.max_tokens, device),
            pools=pools or KVPools.allocate(layers, bounds, kv_dtype, device),
            workspace=Workspace.allocate(layers, bounds, self.shape, dtype, device),
        )

    def narrow(self, tokens: int) -> tuple[StepMetadata, ...]:
        """Metadata of each shard for a step of `tokens` places."""
        return tuple(s.buffers.narrow(s.bounds, self.shape, tokens) for s in self.shards)

    def prepare(self, steps: Sequence[StepMetadata], rows: StepRows) -> None:
        """Stage: derive the metadata of each shard."""
        for shard, step in zip(self.shards, steps, strict=True):
            step.prepare(rows, shard.bounds, self.shape)
            self.attention.epoch.stamp(step)

    def partial_traffic(self) -> float:
        """Bytes of partials over bytes of KV of a split decode row: the most of all layers."""
        query_len = self.bounds.decode_query_len
        return max(
            partial_traffic(layer, self.shape.chunk, query_len, pool.dtype)
            for layer, pool in zip(self.attention.layers, self.shards[0].pools.keys, strict=True)
        )

    def pools(self) -> dict[str, Tensor]:
        """The KV pools by name, of every rank of this process."""
        return {
            f"{name}@{shard.bounds.dcp_rank}": pool
            for shard in self.shards
            for name, pool in shard.pools.tensors().items()
        }

    def scratch(self) -> dict[str, Tensor]:
        """Metadata and workspaces by name: rewritten by every step as far as it uses them."""
        return {
            f"{kind}.{name}@{shard.bounds.dcp_rank}": tensor
            for shard in self.shards
            for kind, group in (("step", shard.buffers), ("workspace", shard.workspace))
            for name, tensor in group.tensors().items()
        }


class StepMemory:
    """The blocks between host and device, the slot state, and the memory of the model."""

    def __init__(
        self,
        model: StepModel,
        bounds: Bounds,
        *,
        kv_dtype: torch.dtype | None,
        device: torch.device,
        group: Group | None = None,
        reduce: Reduce = "ag_rs",
        kernel: ForeignAttention | None = None,
        debug: bool = False,
    ) -> None:
        self.bounds, self.group, self.reduce = bounds, group, reduce
        self.kv_dtype = kv_dtype  # of all pages, a drafter's too; None: of each model's own dtype
        self.epoch = Epoch.start(device) if debug else UNCHECKED
        self.inputs = InputBlock(bounds, device)
        self.output = OutputBlock(bounds, device)
        self.state = SlotState.allocate(bounds, device)
        self.sampler = Sampler.allocate(bounds, device)
        self.slots = SlotMemory(slot_tensors(model), bounds, self.inputs, self.state)
        self.target = ModelMemory(
            model.attention_layers,
            bounds,
            self.state.page_table,
            self.inputs.slot_of_row,
            dtype=model.dtype,
            kv_dtype=kv_dtype,
            group=group,
            reduce=reduce,
            kernel=kernel,
            epoch=self.epoch,
        )

    def scratch(self) -> dict[str, Tensor]:
        """What every step rewrites as far as it uses it, by name; a drafter's comes on top."""
        sampler = self.sampler
        named = {"sampled": sampler.sampled, "logprob": sampler.logprob}
        return self.target.scratch() | named | {"output": self.output.block}

    def lasting(self) -> dict[str, Tensor]:
        """What outlives a step, but for the pools: slot state, token occurrences, and what the
        model keeps of every slot."""
        state = {f"state.{name}": tensor for name, tensor in self.state.tensors().items()}
        state |= {f"slots.{name}": tensor for name, tensor in self.slots.tensors().items()}
        return state | {"occurrences": self.sampler.occurrences}

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor but the pools, by name."""
        return self.lasting() | self.scratch() | {"inputs": self.inputs.block}
