"""Kernels of others for tests: one that does everything right, and ways to do it wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from graphattn import ops
from graphattn.foreign import Capabilities, ForeignAttention
from graphattn.models.contract import AttentionLayer
from graphattn.work import AttentionWork

EVERYTHING = Capabilities(
    exact_empty=True, shards=True, windows=True, softcap=True, sinks=True, latent=True
)


class Right(ForeignAttention):
    """Our own operation behind the contract of others. `after` and `seen` are for its children."""

    def __init__(self, capabilities: Capabilities = EVERYTHING) -> None:
        self.capabilities = capabilities

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
        spare = out.clone(), lse.clone()
        ops.attend(
            q,
            k_pool,
            v_pool,
            self.seen(work),
            ops.Partials.allocate(work, q.shape[1], out.shape[2]),
            out,
            lse,
            scale=layer.scale,
            softcap=layer.softcap,
            sinks=layer.sinks,
        )
        self.after(q, k_pool, work, out, lse, spare)

    def attend_latent(
        self,
        q: Tensor,
        pool: Tensor,
        work: AttentionWork,
        layer: AttentionLayer,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        spare = out.clone(), lse.clone()
        partials = ops.Partials.allocate(work, q.shape[1], out.shape[2])
        ops.attend_latent(q, pool, self.seen(work), partials, out, lse, scale=layer.scale)
        self.after(q, pool, work, out, lse, spare)

    def seen(self, work: AttentionWork) -> AttentionWork:
        return work

    def after(
        self,
        q: Tensor,
        pool: Tensor,
        work: AttentionWork,
        out: Tensor,
        lse: Tensor,
        spare: tuple[Tensor, Tensor],
    ) -> None:
        """`spare` is what out and lse held before the call."""


def empty(work: AttentionWork) -> Tensor:
    """[T, 1]"""
    return (work.visible_end <= work.visible_start)[:, None]


class Base2(Right):
    def after(self, q, pool, work, out, lse, spare):
        lse.div_(math.log(2))


class PlusInf(Right):
    def after(self, q, pool, work, out, lse, spare):
        lse.masked_fill_(empty(work), math.inf)


class Base2PlusInf(Right):
    """Both, and garbage for an output, as kernels elsewhere have it."""

    def after(self, q, pool, work, out, lse, spare):
        lse.div_(math.log(2)).masked_fill_(empty(work), math.inf)
        out.masked_fill_(empty(work)[..., None], math.nan)


class Nan(Right):
    def after(self, q, pool, work, out, lse, spare):
        lse.masked_fill_(empty(work), math.nan)
        out.masked_fill_(empty(work)[..., None], math.nan)


class LeavesEmpty(Right):
    def after(self, q, pool, work, out, lse, spare):
        out.copy_(torch.where(empty(work)[..., None], spare[0], out))
        lse.copy_(torch.where(empty(work), spare[1], lse))


class LeavesRow(Right):
    def after(self, q, pool, work, out, lse, spare):
        out[1] = spare[0][1]


class NoLSE(Right):
    def after(self, q, pool, work, out, lse, spare):
        lse.copy_(spare[1])


class OtherZero(Right):
    def after(self, q, pool, work, out, lse, spare):
        out.add_(empty(work)[..., None] * 1e-3)


class WholePages(Right):
    """Masks by multiplication."""

    def after(self, q, pool, work, out, lse, spare):
        out.add_(0.0 * pool.sum())


class WholeTable(Right):
    def after(self, q, pool, work, out, lse, spare):
        out.add_(0.0 * pool[work.page_table.long()].sum())


class CleansPages(Right):
    def after(self, q, pool, work, out, lse, spare):
        pool.nan_to_num_()


class ScalesQueries(Right):
    def after(self, q, pool, work, out, lse, spare):
        q.mul_(0.5)


class Inaccurate(Right):
    def after(self, q, pool, work, out, lse, spare):
        out.mul_(1.01)


class NoWindow(Right):
    def seen(self, work):
        return replace(work, visible_start=torch.zeros_like(work.visible_start))


class EndsAtTheRow(Right):
    """A causal staircase that ends where the row's last token does."""

    def seen(self, work):
        place = torch.arange(len(work.visible_end), dtype=torch.int32)
        row = torch.searchsorted(work.query_start[1:], place, right=True)
        row = row.clamp(max=len(work.row_end) - 1)
        end = work.row_end[row] - (work.query_start[row + 1] - 1 - place)
        end = torch.where(place < work.query_start[-1], end, 0).clamp(min=0)
        return replace(work, visible_end=end.int())


class PlansOnce(Right):
    """Keeps what it made of the first metadata of a shape."""

    def __init__(self, capabilities: Capabilities = EVERYTHING) -> None:
        super().__init__(capabilities)
        self.plans: dict[int, Tensor] = {}

    def seen(self, work):
        plan = self.plans.setdefault(len(work.visible_end), work.visible_end.clone())
        return replace(work, visible_end=plan)


class ReadsLengths(Right):
    def seen(self, work):
        assert int(work.row_end.max()) >= 0
        return work


class DecodeOnly(Right):
    """Of one query place per row; fails when it meets another."""

    def seen(self, work):
        assert work.prefill_items is None
        assert work.decode_query_len == 1
        return work
