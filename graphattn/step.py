"""The step program: the order of the stages. It is what is captured, and what eager runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from graphattn import sample, verify
from graphattn._capture import nvtx_ranges
from graphattn.attention import Attention, Shard, Workspace, work_shape
from graphattn.bounds import Bounds
from graphattn.config import Bucket
from graphattn.dcp import DCP, ContextParallel
from graphattn.inputs import InputBlock
from graphattn.metadata import StepBuffers
from graphattn.models.contract import AttentionLayer, StepModel
from graphattn.pages import KVPools
from graphattn.ring import OutputBlock
from graphattn.state import SlotState


class ModelStep:
    """What the model sees of a step of one bucket; see `models.contract.ModelStep`."""

    def __init__(self, shards: Sequence[StepBuffers], attention: Attention, bucket: Bucket) -> None:
        self.input_ids = shards[0].input_ids
        self.positions = shards[0].positions
        self.logits_token = shards[0].logits_token
        self._shards = shards
        self._attention = attention
        self._mixed = bucket.mixed

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write K and V, attend over what each token may see; see the contract."""
        with nvtx_ranges.scope(f"attend.{layer}"):
            return self._attention.attend(layer, q, k, v, self._shards, mixed=self._mixed)


class StepMemory:
    """Every device tensor of an engine, allocated once from its bounds."""

    def __init__(
        self,
        model: StepModel,
        bounds: Bounds,
        *,
        kv_dtype: torch.dtype,
        device: torch.device,
        dcp: DCP | None = None,
    ) -> None:
        layers = model.attention_layers
        self.bounds = bounds
        self.shape = work_shape(
            layers,
            page_size=bounds.page_size,
            decode_query_len=bounds.decode_query_len,
            dtype=kv_dtype,
            device=device,
        )
        self.inputs = InputBlock(bounds, device)
        self.output = OutputBlock(bounds, device)
        self.state = SlotState.allocate(bounds, device)
        self.sampled = torch.zeros(
            bounds.logits_places(bounds.max_tokens), dtype=torch.int32, device=device
        )
        self.parallel = (
            None
            if dcp is None
            else ContextParallel(dcp, layers, bounds.max_tokens, kv_dtype, device)
        )
        ranks = (0,) if self.parallel is None else self.parallel.group.ranks
        self.shards = tuple(
            self._shard(layers, replace(bounds, dcp_rank=rank), kv_dtype, device) for rank in ranks
        )
        self.attention = Attention(
            layers=layers,
            shape=self.shape,
            page_table=self.state.page_table,
            slot_of_row=self.inputs.slot_of_row,
            shards=self.shards,
            parallel=self.parallel,
        )

    def _shard(
        self,
        layers: tuple[AttentionLayer, ...],
        bounds: Bounds,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Shard:
        return Shard(
            bounds=bounds,
            buffers=StepBuffers.allocate(bounds, self.shape, bounds.max_tokens, device),
            pools=KVPools.allocate(layers, bounds, dtype, device),
            workspace=Workspace.allocate(layers, bounds, self.shape, dtype, device),
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
        named = {
            f"{kind}.{name}@{shard.bounds.dcp_rank}": tensor
            for shard in self.shards
            for kind, group in (("step", shard.buffers), ("workspace", shard.workspace))
            for name, tensor in group.tensors().items()
        }
        return named | {"sampled": self.sampled, "output": self.output.block}

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor but the pools, by name."""
        state = {f"state.{name}": tensor for name, tensor in self.state.tensors().items()}
        return state | self.scratch() | {"inputs": self.inputs.block}

    def narrow(self, tokens: int) -> tuple[StepBuffers, ...]:
        """Metadata of each shard for a step of `tokens` places."""
        return tuple(s.buffers.narrow(s.bounds, self.shape, tokens) for s in self.shards)


def step_program(model: StepModel, memory: StepMemory, bucket: Bucket) -> Callable[[], None]:
    """The program of one bucket: a function of nothing over fixed memory."""
    state, inputs, output = memory.state, memory.inputs, memory.output
    buffers = memory.narrow(bucket.tokens)
    sampled = memory.sampled[: memory.bounds.logits_places(bucket.tokens)]
    view = ModelStep(buffers, memory.attention, bucket)

    @torch.no_grad()
    def program() -> None:
        with nvtx_ranges.scope("admit"):
            state.admit(inputs)
        with nvtx_ranges.scope("prepare"):
            for shard, step in zip(memory.shards, buffers, strict=True):
                step.prepare(inputs, state, shard.bounds, memory.shape)
        with nvtx_ranges.scope("model"):
            logits = model(view)
        with nvtx_ranges.scope("sample"):
            sample.select(logits, sampled)
            if memory.parallel is not None:
                memory.parallel.group.broadcast([sampled])
        with nvtx_ranges.scope("commit"):
            verify.commit(sampled, inputs.slot_of_row, buffers[0], state, output)

    return program
