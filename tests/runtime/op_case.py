"""Arguments of the public operations, from those of the raw ones, in memory laid out by others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from graphattn import ops
from tests.kernels.attend_case import NOWHERE, Case
from tests.kernels.latent_case import LatentCase


def _common(args: dict[str, Any]) -> dict[str, Any]:
    work = ops.AttentionWork(**{f.name: args[f.name] for f in fields(ops.AttentionWork)})
    partials = ops.Partials(args["partial_out"], args["partial_lse"])
    results = {name: args[name] for name in ("q", "out", "lse", "scale")}
    return {"work": work, "partials": partials, **results}


def attend_args(case: Case) -> dict[str, Any]:
    """Of `ops.attend`."""
    names = ("k_pool", "v_pool", "softcap", "sinks", "k_scale", "v_scale")
    return _common(case.args) | {name: case.args[name] for name in names}


def attend_latent_args(case: LatentCase) -> dict[str, Any]:
    """Of `ops.attend_latent`."""
    return _common(case.args) | {name: case.args[name] for name in ("pool", "latent_scale")}


def holding(base: Tensor, view: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """`view` of `base`, filled with `values`."""
    view.copy_(values)
    return base, view


def _nan(*shape: int, like: Tensor) -> Tensor:
    return torch.full(shape, torch.nan, dtype=like.dtype, device=like.device)


def _own(pool: Tensor) -> tuple[Tensor, Tensor]:
    return pool, pool


def _entries_before_heads(pool: Tensor) -> tuple[Tensor, Tensor]:
    base = pool.transpose(1, -2).contiguous()
    return base, base.transpose(1, -2)


def _one_of_many_layers(pool: Tensor) -> tuple[Tensor, Tensor]:
    base = _nan(3, 2, *pool.shape, like=pool)
    return holding(base, base[1, 1], pool)


def _beside_another(pool: Tensor) -> tuple[Tensor, Tensor]:
    base = _nan(pool.shape[0], 2, *pool.shape[1:], like=pool)
    return holding(base, base[:, 1], pool)


def _wider_entries(pool: Tensor) -> tuple[Tensor, Tensor]:
    base = _nan(*pool.shape[:-1], pool.shape[-1] + 3, like=pool)
    return holding(base, base[..., 1:-2], pool)


# Pools of others: (memory, view of it as a pool), everything outside the view NaN.
LAYOUTS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "own": _own,
    "NHD": _entries_before_heads,
    "[layers, 2, ...]": _one_of_many_layers,
    "[pages, 2, ...]": _beside_another,
    "wider entries": _wider_entries,
}


def foreign_table(table: Tensor, spare: int) -> Tensor:
    """Rows of a wider table, beside columns of ids that are nowhere."""
    base = torch.full((table.shape[0], table.shape[1] + 2 * spare), NOWHERE, dtype=table.dtype)
    return holding(base, base[:, spare : spare + table.shape[1]], table)[1]


def fused(q: Tensor) -> Tensor:
    """q [T, H, D] as a slice of a joint projection of q, k and v."""
    base = _nan(q.shape[0], q.shape[1] + 2, q.shape[2], like=q)
    return holding(base, base[:, : q.shape[1]], q)[1]
