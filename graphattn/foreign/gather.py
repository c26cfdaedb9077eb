"""Paged metadata as dense batches with a mask, for kernels that know neither pages nor ragged rows.

Static shapes, no host reads, and a price: every row is as long as its page table and, where a step
can hold prefill rows, as wide as the whole step.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from graphattn import convert
from graphattn.arguments import FP8
from graphattn.foreign.contract import ForeignAttention
from graphattn.models.contract import AttentionLayer
from graphattn.work import AttentionWork


class DenseAttention(ForeignAttention):
    """A kernel that is called with dense batches: implement `attend_dense`."""

    @abstractmethod
    def attend_dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: Tensor,
        work: AttentionWork,
        layer: AttentionLayer,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """Attention of q [B, Hq, Q, D] over k [B, Hkv, N, D] and v [B, Hkv, N, Dv] where visible
        [B, Q, N]; writes out and lse as `ForeignAttention.attend` does. `scatter` helps."""

    def attend(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        work: AttentionWork,
        layer: AttentionLayer,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """See `ForeignAttention`."""
        rows, (k, v), visible = gather(q, (k_pool, v_pool), work)
        self.attend_dense(rows, k, v, visible, work, layer, out, lse)

    def attend_latent(
        self,
        q: Tensor,
        pool: Tensor,
        work: AttentionWork,
        layer: AttentionLayer,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """See `ForeignAttention`."""
        rows, (latent,), visible = gather(q, (pool.unsqueeze(1),), work)
        values = latent[..., : layer.value_dim]
        self.attend_dense(rows, latent, values, visible, work, layer, out, lse)

    def refusal(self, layer: AttentionLayer, *, page_size: int, dtype: torch.dtype) -> str | None:
        """See `ForeignAttention`."""
        return "FP8 pages" if dtype == FP8 else None


class Dense(NamedTuple):
    """Rows of a step side by side: B rows, Q places each, N = columns * page_size positions."""

    q: Tensor  # [B, Hq, Q, D], 0 at places that see nothing
    entries: tuple[Tensor, ...]  # K and V, or latents: [B, Hkv, N, D], 0 where nobody looks
    visible: Tensor  # [B, Q, N] bool


def gather(q: Tensor, pools: tuple[Tensor, ...], work: AttentionWork) -> Dense:
    """q [T, Hq, D] and pools [pages, Hkv, page_size, D] by row.

    What no token of a row sees is replaced, not masked: it may be NaN, and page ids may be of no
    page.
    """
    tokens, page_size = q.shape[0], pools[0].shape[2]
    columns, device = work.page_table.shape[1], q.device
    place = torch.arange(row_places(tokens, work), device=device)
    first, next_first = work.query_start[:-1, None], work.query_start[1:, None]
    held = first + place < next_first  # [B, Q]
    token = (first + place).clamp_(max=tokens - 1)
    start = work.visible_start[token]
    end = torch.where(held, work.visible_end[token], 0)
    position = torch.arange(columns * page_size, device=device)
    visible = (position >= start[:, :, None]) & (position < end[:, :, None])
    seen = visible.any(1)  # [B, N]
    table = work.page_table.index_select(0, work.slot_of_row.clamp(min=0))
    pages = torch.where(seen.view(-1, columns, page_size).any(2), table, 0).long()
    entries = tuple(_entries(pool, pages, seen) for pool in pools)
    rows = torch.where(visible.any(2)[..., None, None], q[token], 0.0)  # [B, Q, Hq, D]
    return Dense(rows.transpose(1, 2), entries, visible)


def scatter(rows: Tensor, tokens: int, work: AttentionWork) -> Tensor:
    """Values of `tokens` places [T, ...] from rows [B, Q, ...]; any values past the last row."""
    row = convert.rows_of_tokens(work.query_start, tokens).clamp_(min=0)
    place = torch.arange(tokens, device=rows.device) - work.query_start[row]
    return rows[row, place.clamp_(min=0, max=rows.shape[1] - 1)]


def row_places(tokens: int, work: AttentionWork) -> int:
    """Q, most places of a row of this step."""
    return tokens if work.prefill_items is not None else min(tokens, work.decode_query_len)


def _entries(pool: Tensor, pages: Tensor, seen: Tensor) -> Tensor:
    """[B, Hkv, N, D] of pages [B, columns]."""
    rows = pool[pages].transpose(1, 2).flatten(2, 3)
    return torch.where(seen[:, None, :, None], rows, 0.0)
