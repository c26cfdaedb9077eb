"""StepBuffers: static metadata and paged attention for an engine of one's own.

The caller keeps its loop, scheduler, sampler, page table and model. Its step is a function that
first calls `prepare_lengths`, then `attend` in every attention layer; both can be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from graphattn._capture.poison import poison
from graphattn.arguments import FP8, INT32, Arguments, Strides
from graphattn.bounds import Bounds
from graphattn.dcp import DCP
from graphattn.errors import wrong
from graphattn.foreign.contract import ForeignAttention, check_kernel
from graphattn.given import Pools, check_dcp, check_page_table, given_pools
from graphattn.groups import Group
from graphattn.kernels import ops
from graphattn.layer_checks import check_layers
from graphattn.memory import ModelMemory
from graphattn.metadata import StepMetadata, StepRows
from graphattn.models.contract import AttentionLayer
from graphattn.view import ModelStep
from graphattn.work import AttentionWork


@dataclass(slots=True)
class _Shared:
    """What the views of all buckets have in common."""

    memory: ModelMemory
    rows: StepRows  # written by `prepare_lengths`
    own_slots: Tensor  # [B] int32: row r has slot r
    dtype: torch.dtype  # of q, k and v
    group: Group | None
    prepared: StepBuffers | None = None  # the view whose metadata the memory holds


class StepBuffers(ModelStep):
    """All device memory of a step: metadata, workspaces, and KV pools and page table if wanted.

    Allocated once from `bounds` and never regrown; `narrow` gives the views of a smaller bucket of
    the same memory, so that steps of all sizes, captured or not, share it and run one at a time.

    A step has T token places. The tokens of row 0 come first, then those of row 1, and so on;
    places past the last row are padding. `prepare_lengths` takes how many places each row has, from
    tensors that the caller writes between steps, and derives all else *on the device*:

        positions [T] int64        position of each token in its sequence; 0 at padding
        logits_token [L] int64     places whose logits are wanted: `x[buffers.logits_token]`

    A row has logits places of its own, rows in order: as many as it has places, at most
    1 + max_drafts. `metadata.logits_start` [B + 1] has the first of each; where every used row has
    one, the i-th used row has the i-th.

    `attend` writes K and V of the step's tokens into the pages of their rows, then attends: each
    token sees the tokens of its row up to itself. Padding places write nothing and get exactly 0.

    It is also a `ModelStep`, so a model of the step contract, adapters included, runs on it; with
    `prepare_lengths`, `input_ids` is 0 everywhere until the caller copies its ids into it.
    """

    def __init__(self, shared: _Shared, tokens: int, *, mixed: bool) -> None:
        """See `allocate` and `narrow`."""
        self._steps = shared.memory.narrow(tokens)
        super().__init__(self._steps, shared.memory.attention, mixed=mixed)
        self._shared, self._tokens = shared, tokens

    @staticmethod
    def allocate(
        bounds: Bounds,
        layers: Sequence[AttentionLayer],
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        device: torch.device | str,
        page_table: Tensor | None = None,
        pools: Pools | None = None,
        dcp: DCP | None = None,
        attention: ForeignAttention | None = None,
    ) -> StepBuffers:
        """Buffers of the largest step, `bounds.max_tokens` places, prefill and decode mixed.

        Args:
            bounds: see `Bounds`; with `dcp`, its `dcp_size` and `interleave` are those of `dcp`.
            layers: geometry of each attention layer, in the order of `attend`'s index.
            dtype: float32, bfloat16 or float16; of q, k, v and outputs.
            kv_dtype: of the pools, `dtype` by default, or torch.float8_e4m3fn (docs/fp8.md).
            device: of every tensor.
            page_table: int32 [slots, columns] of the caller: the pages of the sequence that each
                slot holds, in order; contiguous rows, at least `bounds.pages_per_seq` columns.
                Entries are needed up to the sequence's length. Default: zeros
                [max_batch, pages_per_seq] for the caller to write into.
            pools: of the caller, (k, v) of each layer, each
                [num_pages, num_kv_heads, page_size, head_dim], or (latent,) of a latent layer,
                [num_pages, page_size, head_dim]. Any strides with a contiguous last dimension: a
                cache laid out as [num_pages, page_size, heads, head_dim] is passed as its
                `transpose(1, 2)`. Default: allocated here. None with a `VirtualGroup`.
            dcp: shard the KV cache of every sequence over a group of ranks; see docs/dcp.md.
            attention: a kernel of others that attends in ours' place; docs/foreign-kernels.md. One
                that plans on the host (`host_plan`) is for loops that are not captured.

        The caller's tensors stay the caller's: kept alive, written only where `attend` says, never
        moved. Raises `ConfigError` naming the argument, or `UnsupportedModelError` for a geometry
        that the kernels do not cover.
        """
        layers, device = tuple(layers), torch.device(device)
        check_layers(layers)
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise wrong("dtype", "float32, bfloat16 or float16", dtype, "Pass that of K and V.")
        if (held := kv_dtype or dtype) not in (dtype, FP8):
            raise wrong("kv_dtype", f"{dtype} or {FP8}", kv_dtype, "Leave it out for the dtype.")
        check_dcp(bounds, dcp)
        if page_table is None:
            size = (bounds.max_batch, bounds.pages_per_seq)
            page_table = torch.zeros(size, dtype=torch.int32, device=device)
        args = check_page_table(page_table, bounds, device)
        given = None if pools is None else given_pools(pools, layers, bounds, held, args, dcp)
        if attention is not None:
            check_kernel(
                attention,
                layers,
                graphs=False,
                page_size=bounds.page_size,
                dtype=held,
                decode_query_len=bounds.decode_query_len,
                dcp_size=bounds.dcp_size,
            )
        rows = _rows(bounds, page_table)
        group = None if dcp is None else dcp.open()
        memory = ModelMemory(
            layers,
            bounds,
            page_table,
            rows.slot_of_row,
            dtype=dtype,
            kv_dtype=held,
            group=group,
            reduce="ag_rs" if dcp is None else dcp.reduce,
            pools=given,
            kernel=attention,
        )
        own_slots = torch.arange(bounds.max_batch, dtype=torch.int32, device=page_table.device)
        shared = _Shared(memory, rows, own_slots, dtype, group)
        return StepBuffers(shared, bounds.max_tokens, mixed=True)

    def narrow(self, tokens: int, *, mixed: bool = True) -> StepBuffers:
        """Views for a step of `tokens` places, at most those of `bounds.max_tokens`.

        `mixed=False` is a step of decode rows only, which launches less: rows have at most
        1 + max_drafts places there, and are never chunks of a prompt. Nothing is allocated.
        """
        most = self.bounds.max_tokens
        if not isinstance(tokens, int) or isinstance(tokens, bool) or not 1 <= tokens <= most:
            raise wrong("tokens", f"an integer in 1..{most}", tokens, "Raise bounds.max_tokens.")
        return StepBuffers(self._shared, tokens, mixed=mixed)

    @property
    def bounds(self) -> Bounds:
        """What the buffers were sized from."""
        return self._shared.memory.bounds

    @property
    def page_table(self) -> Tensor:
        """int32 [slots, columns]; the caller writes it."""
        return self._shared.rows.page_table

    @property
    def metadata(self) -> StepMetadata:
        """What was derived for this process's (first) rank, for kernels of one's own; the meaning
        of each field is in `graphattn/kernels/ops.py`, under `prepare`."""
        return self._steps[0]

    def work(self, layer: int) -> AttentionWork:
        """What attention of a layer reads of the step, on this process's (first) rank: the argument
        of `graphattn.ops.attend`. Its tensors are those of these buffers, for every step."""
        self._spec(layer)
        return self._attention.work(layer, self._steps[0], mixed=self._mixed)

    def prepare_lengths(
        self,
        query_len: Tensor,
        context_len: Tensor,
        *,
        slot_of_row: Tensor | None = None,
        prefill: Tensor | None = None,
    ) -> None:
        """Derive the metadata of a step from lengths; the first thing in a step.

        All int32 [max_batch], contiguous, on the device, one entry per row:

        query_len    token places of the row in this step; 0: the row is not used
        context_len  tokens of its sequence whose K and V are in its pages already
        slot_of_row  its row of the page table; no two rows with places share one.
                     Default: row r has slot r
        prefill      nonzero: the row is a chunk of a prompt. Rows of more than 1 + max_drafts
                     places always are. A chunk has logits at its last place; a decode row at all of
                     its places, those after the first being drafts

        Only contents are read, when the step runs: write new ones (`copy_`) between steps, capture
        once. A row whose slot is not in the table or whose context is not below `max_seq_len` has
        no tokens; tokens past `max_seq_len` do not exist; rows are cut where the places of the step
        end. A row's attention is bitwise the same in every batch and bucket in which it is a chunk,
        and in every one in which it is a decode row.
        """
        rows, bounds, args = self._shared.rows, self.bounds, self._arguments()
        lengths = {"query_len": query_len, "context_len": context_len}
        others = {"slot_of_row": slot_of_row, "prefill": prefill}
        for name, tensor in (lengths | {k: v for k, v in others.items() if v is not None}).items():
            args.take(name, tensor, (bounds.max_batch,), INT32, "contiguous")
        if slot_of_row is None and rows.page_table.shape[0] < bounds.max_batch:
            raise wrong(
                "slot_of_row",
                f"a tensor, since the page table has fewer rows than max_batch {bounds.max_batch}",
                None,
                "Pass the row of the page table that each row uses.",
            )
        ops.rows_from_lengths(
            query_len,
            context_len,
            self._shared.own_slots if slot_of_row is None else slot_of_row,
            prefill if self._mixed else None,
            rows.slot_of_row,
            rows.query_len,
            rows.context_len,
            rows.seq_len,
            rows.prompt_len,
            rows.draft_count,
            self._tokens,
            self._tokens if self._mixed else bounds.decode_query_len,
            bounds.max_drafts,
            bounds.max_seq_len,
        )
        self._prepare(rows)

    def prepare_slots(self, rows: StepRows) -> None:
        """Derive the metadata of a step from slot state, as the engine does: instead of
        `prepare_lengths`, for a caller whose state lives on the device by slot.

        `rows` has the fields of `prepare` in `graphattn/kernels/ops.py`, whose contents are trusted
        to keep what is said there; its `page_table` is that of these buffers, and `history`
        [slots, max_seq_len] gives `input_ids`.
        """
        if rows.page_table is not self.page_table:
            raise wrong(
                "rows.page_table",
                "the page table of these buffers",
                f"another of shape {list(rows.page_table.shape)}",
                "Pass it to StepBuffers.allocate(page_table=...).",
            )
        args, own = self._arguments(), self._shared.rows
        for field in fields(rows):
            layout = getattr(own, field.name).shape
            strides: Strides = "rows" if field.name in ("history", "page_table") else "contiguous"
            args.take(f"rows.{field.name}", getattr(rows, field.name), layout, INT32, strides)
        own.slot_of_row.copy_(rows.slot_of_row)
        self._prepare(rows)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write K and V of the step's tokens into their pages, then attend.

        q [T, num_q_heads, head_dim], k and v [T, num_kv_heads, head_dim], rotated if they are to
        be; any strides with a contiguous last dimension. Returns [T, num_q_heads, head_dim] in a
        buffer that the next `attend` of any layer overwrites: use it, or copy it, before.
        """
        spec = self._layer(layer)
        self._take_values(spec, (spec.num_kv_heads, spec.head_dim), q=q, k=k, v=v)
        return super().attend(layer, q, k, v)

    def attend_latent(self, layer: int, q: Tensor, latent: Tensor) -> Tensor:
        """`attend` of a latent layer: q [T, num_q_heads, head_dim] in the space of the latents,
        latent [T, head_dim]. Returns [T, num_q_heads, value_dim] in a buffer as of `attend`."""
        spec = self._layer(layer)
        self._take_values(spec, (spec.head_dim,), q=q, latent=latent)
        return super().attend_latent(layer, q, latent)

    def pools(self) -> dict[str, Tensor]:
        """KV pools by name, for `Graph(untouched=...)` and `verify(watch=...)`."""
        return self._shared.memory.pools()

    def spoil(self) -> None:
        """Fill all that a step derives or computes here with NaN and ids out of range, to show that
        the next step relies on none of it (`verify(poison=buffers.spoil)`)."""
        rows = self._shared.rows
        derived = [rows.slot_of_row, rows.query_len, rows.context_len, rows.seq_len]
        derived += [rows.prompt_len, rows.draft_count]
        poison(*derived, *self._shared.memory.scratch().values())

    def close(self) -> None:
        """Leave the group of `dcp`, after the graphs that hold its collectives were closed; for all
        views of these buffers. Without `dcp`, or again: nothing."""
        if self._shared.group is not None:
            self._shared.group.close()

    def _prepare(self, rows: StepRows) -> None:
        self._shared.memory.prepare(self._steps, rows)
        self._shared.prepared = self

    def _spec(self, layer: int) -> AttentionLayer:
        layers = self._shared.memory.attention.layers
        if not isinstance(layer, int) or not 0 <= layer < len(layers):
            raise wrong("layer", f"an index in 0..{len(layers) - 1}", layer, "Count from 0.")
        return layers[layer]

    def _layer(self, layer: int) -> AttentionLayer:
        if self._shared.prepared is not self:
            raise wrong(
                "attend",
                "buffers that were prepared for this step",
                "others, or none",
                "Call prepare_lengths of the same (narrowed) buffers first in the step.",
            )
        return self._spec(layer)

    def _take_values(self, spec: AttentionLayer, entry: tuple[int, ...], **tensors: Tensor) -> None:
        """Check q, whose heads DCP may share out, and what each token leaves in the cache."""
        args = self._arguments()
        heads = spec.num_q_heads if self._shared.group is None else "Hq"
        for name, tensor in tensors.items():
            layout = (heads, spec.head_dim) if name == "q" else entry
            args.take(name, tensor, (self._tokens, *layout), (self._shared.dtype,))

    def _arguments(self) -> Arguments:
        """A check of tensors, which must lie where the page table lies."""
        args = Arguments()
        args.take("page_table", self.page_table, ("slots", "columns"), INT32)
        return args


def _rows(bounds: Bounds, page_table: Tensor) -> StepRows:
    """Rows and slot state for a caller who has lengths only: nobody finishes, no token is known."""
    slots, device = page_table.shape[0], page_table.device

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    return StepRows(
        slot_of_row=zeros(bounds.max_batch),
        query_len=zeros(bounds.max_batch),
        context_len=zeros(slots),
        seq_len=zeros(slots),
        prompt_len=zeros(slots),
        finish=zeros(slots),
        history=zeros(1, bounds.max_seq_len).expand(slots, -1),
        draft_tokens=zeros(slots, max(bounds.max_drafts, 1)),
        draft_count=zeros(slots),
        page_table=page_table,
    )
