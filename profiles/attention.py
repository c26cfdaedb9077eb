"""One decode step's attention, alone: every slot at one length, no model around it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from graphattn.bounds import Bounds
from graphattn.memory import StepMemory
from graphattn.metadata import StepRows
from graphattn.models.contract import StepModel
from graphattn.state import Finish


def attention_step(model: StepModel, *, batch: int, length: int) -> Callable[[], None]:
    """A function that runs layer 0's decode attention of `batch` rows of `length` tokens.

    The pages hold random K and V, or latents. Metadata is derived once; the call holds the write,
    attention and merge, as they stand in a captured step.
    """
    page_size = 64
    pages_per_seq = -(-length // page_size)
    bounds = Bounds(
        max_batch=batch,
        max_seq_len=length,
        max_tokens=batch,
        page_size=page_size,
        num_pages=batch * pages_per_seq,
        vocab_size=model.vocab_size,
    )
    memory = StepMemory(model, bounds, kv_dtype=model.dtype, device=model.device)
    for pool in memory.target.pools().values():
        pool.normal_()
    state, inputs = memory.state, memory.inputs
    for field, value in {
        state.generation: 0,
        state.finish: Finish.RUNNING,
        state.context_len: length - 1,
        state.seq_len: length,
        state.prompt_len: 1,
        state.stop_len: length,
        inputs.query_len: 1,
    }.items():
        field.fill_(value)
    slots = torch.arange(batch, dtype=torch.int32, device=model.device)
    inputs.slot_of_row.copy_(slots)
    pages = torch.arange(bounds.num_pages, dtype=torch.int32, device=model.device)
    state.page_table.copy_(pages.view(batch, pages_per_seq))

    shape = memory.target.shape
    buffers = memory.target.shards[0].buffers.narrow(bounds, shape, batch)
    buffers.prepare(StepRows.of(inputs, state), bounds, shape)
    layer = model.attention_layers[0]
    q, k, v = (
        torch.randn(batch, heads, layer.head_dim, dtype=model.dtype, device=model.device)
        for heads in (layer.num_q_heads, layer.num_kv_heads, layer.num_kv_heads)
    )

    def run() -> None:
        memory.target.attention.attend(0, q, k, v, [buffers], mixed=False)

    def run_latent() -> None:
        memory.target.attention.attend_latent(0, q, k[:, 0], [buffers], mixed=False)

    return run_latent if layer.value_dim else run
