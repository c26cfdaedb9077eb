"""Memory that the caller of `StepBuffers` brings: pools and page table, checked."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphattn.arguments import INT32, Arguments
from graphattn.bounds import Bounds
from graphattn.dcp import DCP
from graphattn.errors import wrong
from graphattn.groups import VirtualGroup
from graphattn.models.contract import AttentionLayer
from graphattn.pages import KVPools

Pools = Sequence[Sequence[Tensor]]  # per layer (k, v), or (latent,)


def check_page_table(page_table: Tensor, bounds: Bounds, device: torch.device) -> Arguments:
    """Raise `ConfigError` for a table that cannot hold the bounds; a check of what else must lie
    where it lies."""
    args = Arguments()
    args.take("page_table", page_table, ("slots", "columns"), INT32)
    if page_table.device.type != device.type or page_table.shape[1] < bounds.pages_per_seq:
        raise wrong(
            "page_table",
            f"at least {bounds.pages_per_seq} columns on {device}",
            f"{page_table.shape[1]} on {page_table.device}",
            "Widen it to bounds.pages_per_seq, or lower bounds.max_seq_len.",
        )
    return args


def given_pools(
    pools: Pools,
    layers: Sequence[AttentionLayer],
    bounds: Bounds,
    dtype: torch.dtype,
    args: Arguments,
    dcp: DCP | None,
) -> KVPools:
    """The caller's pools. Raises `ConfigError` for those of another shape, dtype or place."""
    if dcp is not None and isinstance(dcp.group, VirtualGroup):
        raise wrong("pools", "None with a VirtualGroup", "pools", "Each of its ranks needs pools.")
    if len(pools) != len(layers):
        raise wrong(
            "pools", f"one entry for each of {len(layers)} layers", len(pools), "See `layers`."
        )
    for i, (layer, tensors) in enumerate(zip(layers, pools, strict=True)):
        pages = (bounds.num_pages,)
        entry = (bounds.page_size, layer.head_dim)
        shape = (*pages, *entry) if layer.value_dim else (*pages, layer.num_kv_heads, *entry)
        if len(tensors) != (1 if layer.value_dim else 2):
            kind = "(latent,)" if layer.value_dim else "(k, v)"
            raise wrong(f"pools[{i}]", kind, f"{len(tensors)} tensors", "See `pools`.")
        for j, tensor in enumerate(tensors):
            args.take(f"pools[{i}][{j}]", tensor, shape, (dtype,), written=True)
    return KVPools(
        keys=tuple(
            x[0].unsqueeze(1) if y.value_dim else x[0] for x, y in zip(pools, layers, strict=True)
        ),
        values=tuple(None if y.value_dim else x[1] for x, y in zip(pools, layers, strict=True)),
    )


def check_dcp(bounds: Bounds, dcp: DCP | None) -> None:
    """Raise `ConfigError` unless the bounds are those of the group."""
    wanted = (1, 1) if dcp is None else (dcp.size, dcp.interleave)
    got = (bounds.dcp_size, bounds.interleave)
    if bounds.dcp_size != wanted[0] or (dcp is not None and got != wanted):
        raise wrong(
            "bounds.dcp_size, bounds.interleave",
            f"{wanted}, as `dcp` has them",
            got,
            "Make them equal.",
        )
