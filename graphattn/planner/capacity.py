"""What fits beside the weights: pages, KV tokens, sequences."""

from __future__ import annotations

from dataclasses import dataclass

from graphattn.bounds import ceil_div, max_local_length, tokens_in_shard
from graphattn.errors import wrong
from graphattn.planner.constants import MEMORY_SHARE, PAGE_SIZE, RESERVE
from graphattn.planner.gpu import GPU
from graphattn.planner.model import Model
from graphattn.planner.shard import Shard

INTERLEAVE = 1
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of a deployment: requests of `context` prompt and `output` tokens each."""

    context: int
    output: int
    max_batch: int  # sequences that the server runs at once, per group of GPUs
    kv_bytes: int  # of a value in the cache

    @property
    def mean_len(self) -> int:
        """Tokens of a running sequence: requests of all ages run at once."""
        return self.context + self.output // 2


@dataclass(frozen=True, slots=True)
class Capacity:
    """On one group of GPUs; bytes are those of one GPU."""

    weight_bytes: float
    token_bytes: int  # KV of one token, all layers, on a GPU that owns it
    kv_tokens: int
    batch: int
    limited: bool  # by KV, not by `max_batch`


def capacity(model: Model, gpu: GPU, shard: Shard, mtp: int, load: Load) -> Capacity:
    """Raises `ConfigError` with what is missing when not even one sequence fits."""
    modules = min(mtp, model.draft_modules)
    parameters = model.parameters(shard) + model.draft_parameters(shard) * modules
    weights = model.weight_bytes(parameters)
    layers = model.layers + modules
    token_bytes = layers * model.attention.entry_values(shard) * load.kv_bytes
    page_bytes = token_bytes * int(PAGE_SIZE.value)
    free = gpu.memory * MEMORY_SHARE.value - RESERVE.value - weights
    needed = _pages(load.context + load.output, shard) * page_bytes
    if free < needed:
        raise wrong(
            "--gpu",
            f"{(weights + needed) / GIB:.1f} GiB for the weights and one sequence on each GPU of "
            f"--tp {shard.tp} --dcp {shard.dcp} --mtp {mtp}",
            f"{(free + weights) / GIB:.1f} GiB of {gpu.memory / GIB:.1f} GiB",
            f"{(needed - free) / GIB:.1f} GiB are missing: raise --tp, or lower --context.",
        )
    pages = int(free // page_bytes)
    fits = pages // _pages(load.mean_len, shard)
    kv_tokens = tokens_in_shard(pages * int(PAGE_SIZE.value), shard.dcp, INTERLEAVE)
    batch = min(fits, load.max_batch)
    return Capacity(weights, token_bytes, kv_tokens, batch, fits < load.max_batch)


def _pages(tokens: int, shard: Shard) -> int:
    """Of a sequence, on the GPU with its longest shard."""
    longest = max_local_length(tokens, shard.dcp, INTERLEAVE)
    return max(1, ceil_div(longest, int(PAGE_SIZE.value)))
