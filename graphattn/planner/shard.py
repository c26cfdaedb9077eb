"""Which part of a model one GPU has, and parameters by how they are stored."""

from __future__ import annotations

from dataclasses import dataclass

from graphattn.bounds import ceil_div


@dataclass(frozen=True, slots=True)
class Shard:
    """One GPU of a tensor-parallel group of `tp`, of which each `dcp` share a KV cache.

    Heads, intermediate values and the vocabulary are split over `tp`; what every GPU needs whole
    (latent projections, routers, norms) is on each. Inside a `dcp` group all have the same KV
    heads, and each a part of the positions.
    """

    tp: int = 1
    dcp: int = 1

    def kv_heads(self, kv_heads: int) -> int:
        """KV heads on one GPU."""
        return ceil_div(kv_heads * self.dcp, self.tp)


@dataclass(frozen=True, slots=True)
class Parameters:
    """Counts: of linear layers, which a checkpoint may quantize, and of all else."""

    linear: float = 0
    other: float = 0

    def __add__(self, more: Parameters) -> Parameters:
        return Parameters(self.linear + more.linear, self.other + more.other)

    def __mul__(self, times: float) -> Parameters:
        return Parameters(self.linear * times, self.other * times)

    @property
    def total(self) -> float:
        """Of both."""
        return self.linear + self.other
