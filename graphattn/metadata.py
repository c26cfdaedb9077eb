"""Step metadata: the device tensors that `prepare` derives inside the graph, anew in every step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch import Tensor

from graphattn.bounds import Bounds
from graphattn.inputs import InputBlock
from graphattn.kernels import ops
from graphattn.state import SlotState

HEADER = 64  # places before those of a buffer: the first is its stamp, the rest keep it aligned


@dataclass(frozen=True, slots=True)
class WorkShape:
    """How attention work is cut into items; fixed at capture, from the kernels' tile table."""

    windows: tuple[int, ...]  # distinct window sizes of the model's layers; 0 = unlimited
    align: int  # local positions to which a row's range is aligned
    chunk: int  # local positions of the smallest split
    max_splits: int  # splits of a decode row, at most
    prefill_block: int  # query places of a prefill item

    def prefill_items(self, tokens: int, max_batch: int) -> int:
        """Most prefill items of a step of `tokens` places."""
        return tokens // self.prefill_block + max_batch


@dataclass(frozen=True, slots=True)
class StepRows:
    """What `prepare` reads, in its order: the rows of a step, and slot state (int32, by slot)."""

    slot_of_row: Tensor  # [B]
    query_len: Tensor  # [B]
    context_len: Tensor  # [B]
    seq_len: Tensor  # [B]
    prompt_len: Tensor  # [B]
    finish: Tensor  # [B]
    history: Tensor  # [B, max_seq_len]
    draft_tokens: Tensor  # [B, max(K, 1)]
    draft_count: Tensor  # [B]
    page_table: Tensor  # [B, pages_per_seq]

    @staticmethod
    def of(inputs: InputBlock, state: SlotState) -> StepRows:
        """The rows that the host sent, over the state of the slots."""
        return StepRows(
            inputs.slot_of_row,
            inputs.query_len,
            state.context_len,
            state.seq_len,
            state.prompt_len,
            state.finish,
            state.history,
            state.draft_tokens,
            state.draft_count,
            state.page_table,
        )


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """Metadata of one step of T token places; `kernels/ops.py` has the meaning of each field.

    Allocated once for the largest bucket; `narrow` gives a smaller bucket's views of the same
    memory, which begins with a stamp (`stamp_of`). G window groups, L logits places, S splits;
    int32 unless said.
    """

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    row_of_token: Tensor  # [T]
    kv_slot: Tensor  # [T] int64
    visible_start: Tensor  # [G, T]
    visible_end: Tensor  # [T]
    query_start: Tensor  # [B + 1]
    token_count: Tensor  # [B]
    logits_start: Tensor  # [B + 1]
    logits_count: Tensor  # [B]
    logits_token: Tensor  # [L] int64
    row_begin: Tensor  # [G, B]
    row_end: Tensor  # [B]
    row_chunk: Tensor  # [G, B]
    row_splits: Tensor  # [G, B]
    decode_items: Tensor  # [G, B * S, 2]
    decode_count: Tensor  # [G]
    prefill_items: Tensor  # [T // prefill_block + B, 2]
    prefill_count: Tensor  # [1]

    @staticmethod
    def allocate(
        bounds: Bounds, shape: WorkShape, tokens: int, device: torch.device
    ) -> StepMetadata:
        """Buffers for a step of `tokens` places."""
        B, G = bounds.max_batch, len(shape.windows)

        def stamped(dtype: torch.dtype, *size: int) -> Tensor:
            flat = torch.zeros(HEADER + math.prod(size), dtype=dtype, device=device)
            return flat[HEADER:].view(size)

        ints, longs = partial(stamped, torch.int32), partial(stamped, torch.int64)

        return StepMetadata(
            input_ids=longs(tokens),
            positions=longs(tokens),
            row_of_token=ints(tokens),
            kv_slot=longs(tokens),
            visible_start=ints(G * tokens).view(G, tokens),
            visible_end=ints(tokens),
            query_start=ints(B + 1),
            token_count=ints(B),
            logits_start=ints(B + 1),
            logits_count=ints(B),
            logits_token=longs(bounds.logits_places(tokens)),
            row_begin=ints(G, B),
            row_end=ints(B),
            row_chunk=ints(G, B),
            row_splits=ints(G, B),
            decode_items=ints(G, B * shape.max_splits, 2),
            decode_count=ints(G),
            prefill_items=ints(shape.prefill_items(tokens, B), 2),
            prefill_count=ints(1),
        )

    def narrow(self, bounds: Bounds, shape: WorkShape, tokens: int) -> StepMetadata:
        """Views for a step of fewer places. Nothing is allocated."""
        groups = len(shape.windows)
        return replace(
            self,
            input_ids=self.input_ids[:tokens],
            positions=self.positions[:tokens],
            row_of_token=self.row_of_token[:tokens],
            kv_slot=self.kv_slot[:tokens],
            # contiguous for every T: the kernels address group g at g * T
            visible_start=self.visible_start.view(-1)[: groups * tokens].view(groups, tokens),
            visible_end=self.visible_end[:tokens],
            logits_token=self.logits_token[: bounds.logits_places(tokens)],
            prefill_items=self.prefill_items[: shape.prefill_items(tokens, bounds.max_batch)],
        )

    def prepare(self, rows: StepRows, bounds: Bounds, shape: WorkShape) -> None:
        """Stage: derive every field from the rows of the step and the state of their slots."""
        ops.prepare(
            *(getattr(rows, f.name) for f in fields(rows)),
            *(getattr(self, f.name) for f in fields(self)),
            list(shape.windows),
            bounds.max_drafts,
            bounds.page_size,
            bounds.dcp_size,
            bounds.dcp_rank,
            bounds.interleave,
            shape.align,
            shape.chunk,
            shape.max_splits,
            shape.prefill_block,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Every field by name, for verification and reports."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def stamp_of(tensor: Tensor) -> Tensor:
    """[1], the first place of the memory that a metadata buffer is in."""
    return tensor.as_strided((1,), (1,), 0)


def window_groups(windows: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Distinct windows in order of appearance, and the group of each layer."""
    groups = tuple(dict.fromkeys(windows))
    return groups, tuple(groups.index(w) for w in windows)
