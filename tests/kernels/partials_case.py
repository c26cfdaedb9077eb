"""Partial attention of W ranks as the ops over a group take it, with what a kernel may err."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphattn.kernels import ops
from graphattn.kernels.merge_packed import merge_packed
from graphattn.kernels.pack_partial import pack_partial
from graphattn.kernels.scale_partial import scale_partial
from tests.kernels.implementations import DEVICE, Run, implementations

TRITON = {
    "scale_partial": scale_partial,
    "pack_partial": pack_partial,
    "merge_packed": merge_packed,
}
INF, NAN = torch.inf, torch.nan

run_cpu, run_triton = implementations(ops, TRITON)
each_implementation = pytest.mark.parametrize("run", [run_cpu, run_triton], ids=["cpu", "triton"])


def draw_partials(
    ranks: int, tokens: int, heads: int, dim: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """outs [W, T, H, D] and lses [W, T, H]; a third of the shards is empty, and NaN where it is.

    Token 0 sees nothing on any rank.
    """
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(ranks, tokens, heads, dim, generator=generator).to(dtype)
    lses = 7 * torch.randn(ranks, tokens, heads, generator=generator)
    lses[torch.rand(lses.shape, generator=generator) < 1 / 3] = -INF
    lses[:, 0] = -INF
    outs[lses == -INF] = NAN
    return outs, lses


def draw_sinks(heads: int) -> Tensor:
    return 3 * torch.randn(heads, generator=torch.Generator().manual_seed(heads))


def as_bytes(x: Tensor) -> Tensor:
    """For comparisons in which NaN equals itself and 0 does not equal -0."""
    return x.contiguous().view(torch.uint8)


def assert_near(got: Tensor, wanted: Tensor, outs: Tensor, lses: Tensor, run: Run) -> None:
    """Within what fp32 weights and one store may err.

    With unit roundoff u (twice that on a GPU, whose exp is approximate) a weight exp(lse - total)
    has relative error (4 M + W + 16) u, M the largest magnitude of an LSE: rounding of differences
    and of their base change, of `total`, of a sum over W ranks, of exp itself. Weights sum to at
    most 1. A store rounds by half an ulp, in the interpreter, which truncates, by one.
    """
    on_gpu = run is run_triton and DEVICE == "cuda"
    u = 2.0**-23 if on_gpu else 2.0**-24
    magnitude = float(lses[lses.isfinite()].abs().max()) if lses.isfinite().any() else 0.0
    largest = float(outs[outs.isfinite()].double().abs().max())
    ulp = 0.0 if got.dtype == torch.float32 else torch.finfo(got.dtype).eps
    torch.testing.assert_close(
        got.double(),
        wanted,
        atol=(4 * magnitude + len(lses) + 16) * u * largest,
        rtol=ulp if run is run_triton and not on_gpu else ulp / 2,
    )
