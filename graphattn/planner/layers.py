"""Attention and feed-forward layers: parameters on one GPU, KV values, operations.

An operation is a multiplication or an addition: 2 per parameter and token, or per value of a
query-key pair. Counts on one GPU are fractions when a size does not divide.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphattn.planner.shard import Parameters, Shard


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Multi-head, grouped-query and multi-query attention."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool

    def parameters(self, shard: Shard) -> Parameters:
        """On one GPU."""
        q = self.heads * self.head_dim / shard.tp
        kv = 2 * shard.kv_heads(self.kv_heads) * self.head_dim
        other = (q + kv) * self.qkv_bias + self.hidden * self.out_bias
        return Parameters(self.hidden * (2 * q + kv), other + 2 * self.head_dim * self.qk_norm)

    def entry_values(self, shard: Shard) -> int:
        """Values that a token leaves in the cache of the GPU that owns it."""
        return 2 * shard.kv_heads(self.kv_heads) * self.head_dim

    @property
    def query_dim(self) -> int:
        """Width of a query head over the cache."""
        return self.head_dim

    @property
    def out_dim(self) -> int:
        """Width of a head of the output over the cache."""
        return self.head_dim

    @property
    def prompt_dim(self) -> int:
        """Width of a query head and of its output where a prompt attends to itself."""
        return 2 * self.head_dim


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """MLA: one latent a token, for all heads; decoding attends to it, a prompt to expanded K, V."""

    hidden: int
    heads: int
    q_rank: int  # 0: queries come from the hidden state directly
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    def parameters(self, shard: Shard) -> Parameters:
        """On one GPU."""
        heads = self.heads / shard.tp
        queries = heads * (self.nope_dim + self.rope_dim)
        q = self.hidden * self.q_rank + self.q_rank * queries
        linear = q if self.q_rank else self.hidden * queries
        linear += self.hidden * (self.kv_rank + self.rope_dim)
        linear += self.kv_rank * heads * (self.nope_dim + self.value_dim)
        return Parameters(linear + heads * self.value_dim * self.hidden, self.q_rank + self.kv_rank)

    def entry_values(self, shard: Shard) -> int:
        """Values that a token leaves in the cache of the GPU that owns it."""
        return self.query_dim

    @property
    def query_dim(self) -> int:
        """Width of a query head over the cache."""
        return self.kv_rank + self.rope_dim

    @property
    def out_dim(self) -> int:
        """Width of a head of the output over the cache."""
        return self.kv_rank

    @property
    def prompt_dim(self) -> int:
        """Width of a query head and of its output where a prompt attends to itself."""
        return self.nope_dim + self.rope_dim + self.value_dim


Attention = GroupedAttention | LatentAttention


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """Gate, up and down projections."""

    hidden: int
    intermediate: int

    def parameters(self, shard: Shard) -> Parameters:
        """On one GPU."""
        return Parameters(3 * self.hidden * self.intermediate / shard.tp)


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed experts, each split over all GPUs, beside one that all tokens share."""

    hidden: int
    count: int
    per_token: int
    intermediate: int
    shared_intermediate: int
    router_bias: bool

    def parameters(self, shard: Shard) -> Parameters:
        """On one GPU, all experts."""
        return self._of(self.count, shard)

    def active(self, shard: Shard) -> Parameters:
        """On one GPU, what one token uses."""
        return self._of(self.per_token, shard)

    def read(self, tokens: float, shard: Shard) -> Parameters:
        """On one GPU, what a step of `tokens` tokens reads."""
        return self._of(self.touched(tokens), shard)

    def touched(self, tokens: float) -> float:
        """Experts that `tokens` tokens choose between them, if they choose independently."""
        return float(self.count * (1 - (1 - self.per_token / self.count) ** tokens))

    def _of(self, experts: float, shard: Shard) -> Parameters:
        values = experts * self.intermediate + self.shared_intermediate
        router = self.hidden * self.count + self.count * self.router_bias
        return Parameters(3 * self.hidden * values / shard.tp, router)
