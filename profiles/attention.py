"""One decode step's attention, alone: rows of given lengths over pages, no model around it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphattn import AttentionLayer, Bounds, StepBuffers
from graphattn.bounds import ceil_div


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """B rows of one new token each, and the pages that hold their K and V, or latents.

    The pages of a row lie anywhere in the pools. `run` writes the new token's entry first, so call
    it once before somebody else reads the pages. Everything belongs to this object.
    """

    layer: AttentionLayer
    lengths: tuple[int, ...]  # tokens of each row, the new one included
    buffers: StepBuffers  # prepared for these lengths
    pools: tuple[
        Tensor, ...
    ]  # K and V [pages, Hkv, page_size, D], or latents [pages, page_size, D]
    q: Tensor  # [B, Hq, D]
    entry: tuple[Tensor, ...]  # of the new token: k and v [B, Hkv, D], or latent [B, D]

    @property
    def seq_lens(self) -> Tensor:
        """`lengths` on the device, int32 [B]."""
        return torch.tensor(self.lengths, dtype=torch.int32, device=self.q.device)

    @property
    def max_seq_len(self) -> int:
        """The bound that buffers were sized for; no length is above it."""
        return self.buffers.bounds.max_seq_len

    def run(self) -> Tensor:
        """Write, attention and merge, as they stand in a captured step: [B, Hq, Dv], in a buffer
        that the next call overwrites. Metadata is derived already."""
        if self.layer.value_dim:
            return self.buffers.attend_latent(0, self.q, *self.entry)
        return self.buffers.attend(0, self.q, *self.entry)

    def dense(self) -> tuple[Tensor, Tensor]:
        """Copies of K [B, Hkv, N, D] and V [B, Hkv, N, Dv] without pages, each row as long as the
        bound: what a static cache holds. N is `max_seq_len`, zeros past a row's length."""
        found = tuple(self._gathered(pool) for pool in self.pools)
        return (found[0], found[0][..., : self.layer.value_dim]) if len(found) == 1 else found  # type: ignore[return-value]

    def exact(self) -> Tensor:
        """Attention of each row in float64, row by row: [B, Hq, Dv]."""
        return self._reference(torch.float64)

    def budget(self) -> float:
        """Largest error of a right kernel in this dtype, against `exact`: twice what plain torch
        makes of it in the dtype of the pools, and one rounding."""
        wanted, plain = self.exact(), self._reference(self.q.dtype)
        rounding = torch.finfo(self.q.dtype).eps * float(wanted.abs().max())
        return 2 * (float((plain - wanted).abs().max()) + rounding)

    def _gathered(self, pool: Tensor) -> Tensor:
        pool = pool.unsqueeze(1) if pool.dim() == 3 else pool
        rows = [self._row(pool, row, length) for row, length in enumerate(self.lengths)]
        whole = pool.new_zeros(len(rows), pool.shape[1], self.max_seq_len, pool.shape[3])
        for target, row in zip(whole, rows, strict=True):
            target[:, : row.shape[1]] = row
        return whole

    def _row(self, pool: Tensor, row: int, length: int) -> Tensor:
        """[Hkv, length, D] of a row."""
        pages = self.buffers.page_table[row, : ceil_div(length, pool.shape[2])].long()
        return pool[pages].transpose(0, 1).flatten(1, 2)[:, :length]

    def _reference(self, dtype: torch.dtype) -> Tensor:
        layer, rows = self.layer, []
        group = layer.num_q_heads // layer.num_kv_heads
        for row, length in enumerate(self.lengths):
            entries = [
                self._row(p.unsqueeze(1) if p.dim() == 3 else p, row, length).to(dtype)
                for p in self.pools
            ]
            k, v = entries[0], entries[-1][..., : layer.out_dim]
            q = self.q[row].to(dtype).unflatten(0, (layer.num_kv_heads, group))
            weights = (q @ k.mT * layer.scale).softmax(-1)
            rows.append((weights @ v).flatten(0, 1))
        return torch.stack(rows).double()


def decode_attention(
    layer: AttentionLayer,
    lengths: Sequence[int],
    *,
    max_seq_len: int | None = None,
    page_size: int = 64,
    dtype: torch.dtype,
    device: torch.device,
) -> DecodeAttention:
    """Rows of `lengths` tokens with seeded random contents; `max_seq_len` is their longest."""
    batch, bound = len(lengths), max_seq_len or max(lengths)
    counts = [ceil_div(length, page_size) for length in lengths]
    num_pages = max(sum(counts), ceil_div(bound, page_size))
    draw = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=draw)

    kv_heads = () if layer.value_dim else (layer.num_kv_heads,)
    pools = tuple(
        normal(num_pages, *kv_heads, page_size, layer.head_dim)
        for _ in range(1 if layer.value_dim else 2)
    )
    buffers = StepBuffers.allocate(
        Bounds(batch, bound, max_tokens=batch, page_size=page_size, num_pages=num_pages),
        [layer],
        dtype=dtype,
        device=device,
        pools=[pools],
    ).narrow(batch, mixed=False)
    shuffled = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0)).int()
    for row, pages in enumerate(shuffled[: sum(counts)].split(counts)):
        buffers.page_table[row, : len(pages)] = pages.to(device)
    context = torch.tensor(lengths, dtype=torch.int32, device=device) - 1
    buffers.prepare_lengths(torch.ones_like(context), context)
    entry = tuple(normal(batch, *kv_heads, layer.head_dim) for _ in pools)
    q = normal(batch, layer.num_q_heads, layer.head_dim)
    return DecodeAttention(layer, tuple(lengths), buffers, pools, q, entry)


def gqa(heads: int, kv_heads: int, head_dim: int) -> AttentionLayer:
    """A layer with K and V."""
    return AttentionLayer(heads, kv_heads, head_dim, scale=head_dim**-0.5)


def latent(heads: int, head_dim: int = 576, value_dim: int = 512) -> AttentionLayer:
    """A layer with latents; by default DeepSeek's, whose heads are 192 wide before absorption."""
    return AttentionLayer(heads, 1, head_dim, scale=1 / math.sqrt(192), value_dim=value_dim)
