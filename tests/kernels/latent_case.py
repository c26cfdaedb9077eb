"""Inputs of one latent attention call: those of `attend_case` with one KV head and no V of its own.

So everything unseen is poisoned here too: entries of the pool, page ids, outputs and partials.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from graphattn.kernels.attend_latent_ref import attend_latent_ref
from tests.kernels import attend_case
from tests.kernels.attend_case import Budget, Row, Setting


@dataclass(frozen=True)
class Latent:
    """Geometry of a latent layer; all else is in `setting`, whose heads and dim are not read."""

    heads: int = 2
    value_dim: int = 32
    rope_dim: int = 16
    setting: Setting = Setting()  # noqa: RUF009  frozen

    @property
    def dim(self) -> int:
        return self.value_dim + self.rope_dim

    def with_options(self, **options: Any) -> Latent:
        return replace(self, setting=replace(self.setting, **options))


@dataclass
class LatentCase:
    """Arguments of `attend_latent` by name, in the order of its signature."""

    setting: Setting
    row_places: list[slice]
    args: dict[str, Any]

    def oracle(self) -> tuple[Tensor, Tensor]:
        a = self.args
        names = "q pool page_table slot_of_row query_start visible_start visible_end"
        inputs = (a[name] for name in names.split())
        return attend_latent_ref(
            *inputs,
            value_dim=a["out"].shape[2],
            scale=a["scale"],
            latent_scale=a["latent_scale"],
        )


def build(rows: Sequence[Row], latent: Latent, *, reverse_items: bool = False) -> LatentCase:
    """A call for `rows`."""
    setting = replace(latent.setting, heads=latent.heads, kv_heads=1, dim=latent.dim)
    case = attend_case.build(rows, setting, reverse_items=reverse_items)
    args = dict(case.args)
    for name in ("sinks", "softcap", "v_pool", "k_scale", "v_scale"):
        del args[name]
    for name in ("out", "partial_out"):
        args[name] = args[name][..., : latent.value_dim].contiguous()
    args = {"q": args.pop("q"), "pool": args.pop("k_pool").squeeze(1), **args}
    # Of the values, of the rope key.
    scale = torch.tensor([0.7, 1.9], device=setting.device) if setting.scales else None
    args["latent_scale"] = scale
    return LatentCase(setting, case.row_places, args)


def check(case: LatentCase, out: Tensor | None = None, lse: Tensor | None = None) -> None:
    """Compare with the oracle within the budget; places that see nothing must be (0, -inf)."""
    a = case.args
    out = (a["out"] if out is None else out).double().cpu()
    lse = (a["lse"] if lse is None else lse).double().cpu()
    wanted_out, wanted_lse = case.oracle()
    entries = a["pool"].float() * (1.0 if a["latent_scale"] is None else 1.9)  # at most
    budget = Budget.for_entries(case.setting, a, keys=entries, values=entries[..., : out.shape[2]])
    torch.testing.assert_close(out, wanted_out, atol=budget.out, rtol=budget.out_relative)
    torch.testing.assert_close(lse, wanted_lse, atol=budget.lse, rtol=0)
    empty = (a["visible_end"] <= a["visible_start"]).cpu()
    assert (out[empty] == 0).all()
    assert (lse[empty] == -math.inf).all()


def union(shares: Sequence[LatentCase]) -> tuple[Tensor, Tensor]:
    """out and lse over the union of what each rank holds; empty shares have weight 0."""
    outs, lses = (
        torch.stack([case.args[name].double() for case in shares]) for name in ("out", "lse")
    )
    lse = torch.logsumexp(lses, 0)
    weights = torch.where(lses == -torch.inf, 0.0, torch.exp(lses - lse))
    return (weights[..., None] * outs).sum(0), lse
