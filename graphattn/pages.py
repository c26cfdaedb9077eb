"""KV pages: the pools on the device, and the allocator on the host.

The allocator works only with upper bounds: it never needs a device value. The same page ids
serve every rank of a DCP group, since rank 0's shard is the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphattn.bounds import Bounds
from graphattn.inputs import PageUpdate
from graphattn.models.contract import AttentionLayer


def page_bytes(layers: Sequence[AttentionLayer], page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers."""
    return sum(layer.entry_values for layer in layers) * page_size * dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVPools:
    """K and V of every layer, each [num_pages, num_kv_heads, page_size, head_dim].

    The keys of a latent layer are its latents (num_kv_heads = 1); they hold its values too.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor | None, ...]  # None of a latent layer

    @staticmethod
    def allocate(
        layers: Sequence[AttentionLayer], bounds: Bounds, dtype: torch.dtype, device: torch.device
    ) -> KVPools:
        """Zeroed pools; on a CPU the memory is committed only as it is written."""

        def pool(layer: AttentionLayer) -> Tensor:
            shape = (bounds.num_pages, layer.num_kv_heads, bounds.page_size, layer.head_dim)
            return torch.zeros(shape, dtype=dtype, device=device)

        return KVPools(
            keys=tuple(pool(layer) for layer in layers),
            values=tuple(None if layer.value_dim else pool(layer) for layer in layers),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Every pool by name."""
        named = {f"keys.{i}": pool for i, pool in enumerate(self.keys)}
        values = {f"values.{i}": pool for i, pool in enumerate(self.values) if pool is not None}
        return named | values

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.numel() * pool.itemsize for pool in self.tensors().values())


class PageAllocator:
    """Pages of each slot, handed out as the bound on its length grows.

    A request reserves the pages of its longest possible length when it is admitted, so a running
    request never finds the pool empty; pages are taken only as they are needed.
    Invariant: free + taken == num_pages, and taken + promised <= num_pages, where `promised` are
    the pages that running requests reserved and have not taken.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._free = list(range(bounds.num_pages - 1, -1, -1))
        self._taken: dict[int, list[int]] = {}
        self._reserved: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Pages that no slot has taken."""
        return len(self._free)

    @property
    def taken(self) -> int:
        """Pages that slots hold."""
        return self._bounds.num_pages - len(self._free)

    @property
    def promised(self) -> int:
        """Pages reserved by running requests and not taken yet."""
        return sum(n - len(self._taken[slot]) for slot, n in self._reserved.items())

    def pages_of(self, slot: int) -> tuple[int, ...]:
        """Pages of a slot, by column."""
        return tuple(self._taken.get(slot, ()))

    def fits(self, num_tokens: int) -> bool:
        """Whether a request that may grow to `num_tokens` can be admitted now."""
        return self._bounds.pages_for(num_tokens) <= self.free - self.promised

    def reserve(self, slot: int, num_tokens: int) -> None:
        """Admit a request of at most `num_tokens` tokens to `slot`; call `fits` first."""
        assert slot not in self._reserved, f"slot {slot} is taken"
        assert self.fits(num_tokens), "reserve without fits"
        self._reserved[slot] = self._bounds.pages_for(num_tokens)
        self._taken[slot] = []

    def grow(self, slot: int, num_tokens: int) -> list[PageUpdate]:
        """Take pages until `slot` can hold `num_tokens`; the page-table updates that say so."""
        pages = self._taken[slot]
        needed = self._bounds.pages_for(num_tokens)
        assert needed <= self._reserved[slot], f"slot {slot} outgrew its reservation"
        first = len(pages)
        while len(pages) < needed:
            pages.append(self._free.pop())
        return [PageUpdate(slot, column, pages[column]) for column in range(first, len(pages))]

    def release(self, slot: int) -> None:
        """Return the pages of `slot`.

        They may be given to another slot in the next step at once: all steps run in one stream,
        and that step releases `slot` before it writes anything.
        """
        self._free.extend(reversed(self._taken.pop(slot)))
        del self._reserved[slot]
