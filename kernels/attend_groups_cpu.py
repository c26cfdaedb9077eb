"""Attention of a plan's groups on the CPU, one KV chunk after the other, which are then joined:

s = scale * (q . k)    [R*Hkv, G*J, n]    R items, G query heads per KV head,
m = max s                                 J queries, n positions of a chunk
l = sum exp(s - m)
o = exp(s - m) @ v     [R*Hkv, G*J, Dv]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from .attend_plan_cpu import Chunk, Group

# Entries [n] of a pool -> their K [n, D] and V [n, Dv], fp32.
Load = Callable[[Tensor], tuple[Tensor, Tensor]]

_LOWEST = torch.finfo(torch.float32).min


def attend_groups(
    q: Tensor,
    groups: Iterable[Group],
    load: Load,
    num_kv_heads: int,
    scale: float | Tensor,
    softcap: float,
    sinks: Tensor | None,
    num_places: Tensor,
    out: Tensor,
    lse: Tensor,
    value_scale: Tensor | None = None,
) -> None:
    """Write all of out [T, Hq, Dv] and lse [T, Hq] for q [T, Hq, D].

    `scale` multiplies q (a tensor: broadcast against it), `value_scale` out likewise: the scales
    of FP8 entries are common to all positions.

    A place in no group sees nothing: out 0, and lse -inf, or the sink where it is before
    `num_places` (query_start[B], a scalar tensor).
    """
    groups = tuple(groups)
    if sum(group.num_places for group in groups) < q.shape[0]:
        out.zero_()
        lse.fill_(-math.inf)
        if sinks is not None:
            lse[: int(num_places)] = sinks
    for group in groups:
        group_out, group_lse = _attend_group(q, group, load, num_kv_heads, scale, softcap)
        if sinks is not None:
            with_sinks = torch.logaddexp(group_lse, sinks)
            group_out *= (group_lse - with_sinks).exp_().unsqueeze(-1)
            group_lse = with_sinks
        if value_scale is not None:
            group_out *= value_scale
        out[group.places] = group_out.to(out.dtype)
        lse[group.places] = group_lse


class _Part(NamedTuple):
    """Attention over some of the positions: maximum, sum and values of the exponentials."""

    m: Tensor  # [R * Hkv, G * J, 1]
    l: Tensor  # [R * Hkv, G * J, 1]
    o: Tensor  # [R * Hkv, G * J, Dv]


def _attend_group(
    q: Tensor, group: Group, load: Load, Hkv: int, scale: float | Tensor, softcap: float
) -> tuple[Tensor, Tensor]:
    """out [R * J, Hq, Dv] and lse [R * J, Hq] of a group, both fp32, without sinks."""
    q = q[group.places].float() * scale
    Hq, D = q.shape[1:]
    R = group.num_items
    G, J = Hq // Hkv, q.shape[0] // R
    if J > 1:  # one query per item lies by head already
        q = q.view(R, J, Hkv, G, D).permute(0, 2, 3, 1, 4)
    q = q.reshape(R * Hkv, G * J, D)
    parts = (_attend_chunk(q, load, c, (R, Hkv, G, J), softcap) for c in group.chunks)
    m, l, o = reduce(_join, parts)
    o /= l.clamp_min(1.0)  # the largest term is exp(0), so l >= 1 unless nothing is visible
    m += l.log_()
    if J == 1:
        return o.view(R, Hq, -1), m.view(R, Hq)
    return _by_place(o, R, Hkv, G), _by_place(m, R, Hkv, G).squeeze(-1)


def _attend_chunk(
    q: Tensor, load: Load, chunk: Chunk, shape: tuple[int, int, int, int], softcap: float
) -> _Part:
    """q [R * Hkv, G * J, D], scaled; `shape` is (R, Hkv, G, J)."""
    k, v = (x.view(q.shape[0], -1, x.shape[-1]) for x in load(chunk.entry))
    s = torch.bmm(q, k.transpose(1, 2))
    if softcap > 0.0:
        s.div_(softcap).tanh_().mul_(softcap)
    if chunk.hidden is not None:
        s.view(*shape, -1).masked_fill_(chunk.hidden, -math.inf)
    # A query that sees nothing here gets a finite maximum: exp(-inf - lowest) is 0.
    m = s.amax(-1, keepdim=True).clamp_min_(_LOWEST)
    p = s.sub_(m).exp_()
    return _Part(m, p.sum(-1, keepdim=True), torch.bmm(p, v))


def _join(a: _Part, b: _Part) -> _Part:
    """Attention over the union of the positions of `a` and `b`."""
    m = torch.maximum(a.m, b.m)
    wa, wb = (a.m - m).exp_(), (b.m - m).exp_()
    return _Part(m, a.l * wa + b.l * wb, a.o.mul_(wa).addcmul_(b.o, wb))


def _by_place(x: Tensor, R: int, Hkv: int, G: int) -> Tensor:
    """[R * Hkv, G * J, n] -> [R * J, Hkv * G, n]"""
    x = x.view(R, Hkv, G, -1, x.shape[-1]).permute(0, 3, 1, 2, 4)
    return x.reshape(-1, Hkv * G, x.shape[-1])
