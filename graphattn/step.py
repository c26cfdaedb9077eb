"""The step program: the order of the stages. It is what is captured, and what eager runs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from graphattn import sample, verify
from graphattn._capture import nvtx_ranges
from graphattn.attention import Attention, Workspace, work_shape
from graphattn.bounds import Bounds
from graphattn.config import Bucket
from graphattn.inputs import InputBlock
from graphattn.metadata import StepBuffers
from graphattn.models.contract import StepModel
from graphattn.pages import KVPools
from graphattn.ring import OutputBlock
from graphattn.state import SlotState


class ModelStep:
    """What the model sees of a step of one bucket; see `models.contract.ModelStep`."""

    def __init__(self, buffers: StepBuffers, attention: Attention, bucket: Bucket) -> None:
        self.input_ids = buffers.input_ids
        self.positions = buffers.positions
        self.logits_token = buffers.logits_token
        self._buffers = buffers
        self._attention = attention
        self._mixed = bucket.mixed

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write K and V, attend over what each token may see; see the contract."""
        with nvtx_ranges.scope(f"attend.{layer}"):
            return self._attention.attend(layer, q, k, v, self._buffers, mixed=self._mixed)


class StepMemory:
    """Every device tensor of an engine, allocated once from its bounds."""

    def __init__(
        self,
        model: StepModel,
        bounds: Bounds,
        *,
        kv_dtype: torch.dtype,
        device: torch.device,
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
        self.buffers = StepBuffers.allocate(bounds, self.shape, bounds.max_tokens, device)
        self.sampled = torch.zeros(
            bounds.logits_places(bounds.max_tokens), dtype=torch.int32, device=device
        )
        self.pools = KVPools.allocate(layers, bounds, kv_dtype, device)
        self.workspace = Workspace.allocate(layers, bounds, self.shape, kv_dtype, device)
        self.attention = Attention(
            layers=layers,
            bounds=bounds,
            shape=self.shape,
            page_table=self.state.page_table,
            slot_of_row=self.inputs.slot_of_row,
            pools=self.pools,
            workspace=self.workspace,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor but the pools by name: what a replay and an eager step must agree on."""
        groups = {
            "state": self.state.tensors(),
            "step": self.buffers.tensors(),
            "workspace": self.workspace.tensors(),
        }
        named = {f"{g}.{n}": t for g, tensors in groups.items() for n, t in tensors.items()}
        return named | {
            "inputs": self.inputs.block,
            "output": self.output.block,
            "sampled": self.sampled,
        }


def step_program(model: StepModel, memory: StepMemory, bucket: Bucket) -> Callable[[], None]:
    """The program of one bucket: a function of nothing over fixed memory."""
    bounds, shape, state = memory.bounds, memory.shape, memory.state
    inputs, output = memory.inputs, memory.output
    buffers = memory.buffers.narrow(bounds, shape, bucket.tokens)
    sampled = memory.sampled[: bounds.logits_places(bucket.tokens)]
    view = ModelStep(buffers, memory.attention, bucket)

    @torch.no_grad()
    def program() -> None:
        with nvtx_ranges.scope("admit"):
            state.admit(inputs)
        with nvtx_ranges.scope("prepare"):
            buffers.prepare(inputs, state, bounds, shape)
        with nvtx_ranges.scope("model"):
            logits = model(view)
        with nvtx_ranges.scope("sample"):
            sample.select(logits, sampled)
        with nvtx_ranges.scope("commit"):
            verify.commit(sampled, inputs.slot_of_row, buffers, state, output)

    return program
