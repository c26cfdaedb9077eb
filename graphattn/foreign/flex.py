"""torch's FlexAttention over gathered pages: visible ranges and soft-cap are its score function.

Its eager form, which materialises the scores: torch compiles FlexAttention with an LSE for GPUs
only. A score function is a higher-order operator, which recorders refuse, so the call is one torch
op here, with a true mutation schema.
"""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from graphattn.foreign.contract import Capabilities
from graphattn.foreign.gather import DenseAttention, scatter
from graphattn.models.contract import AttentionLayer
from graphattn.work import AttentionWork

_library = torch.library.Library("graphattn_flex", "DEF")
_library.define(
    "attend(Tensor q, Tensor k, Tensor v, Tensor visible, Tensor(a!) out, Tensor(b!) lse, "
    "float scale, float softcap) -> ()"
)

_VMAP = torch._C.DispatchKey.FuncTorchBatched


class Flex(DenseAttention):
    """See the module. Cost and memory follow rows x places x max_seq_len, whatever is seen."""

    capabilities = Capabilities(
        exact_empty=True, shards=True, windows=True, softcap=True, sinks=True, latent=True
    )

    def attend_dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: Tensor,
        work: AttentionWork,
        layer: AttentionLayer,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """See `DenseAttention`."""
        rows_out = q.new_empty(*q.shape[:3], v.shape[3])
        rows_lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        torch.ops.graphattn_flex.attend(
            q, k, v.contiguous(), visible, rows_out, rows_lse, layer.scale, layer.softcap
        )
        tokens = out.shape[0]
        inside = torch.arange(tokens, device=q.device) < work.query_start[-1]
        rows = scatter(rows_out.transpose(1, 2), tokens, work)
        out.copy_(torch.where(inside[:, None, None], rows, 0.0))
        rows = scatter(rows_lse.transpose(1, 2), tokens, work)
        lse.copy_(torch.where(inside[:, None], rows, -torch.inf))
        if layer.sinks is not None:
            rows = torch.logaddexp(lse, layer.sinks)
            out.mul_((lse - rows).exp()[..., None])
            lse.copy_(torch.where(inside[:, None], rows, -torch.inf))


def _attend(*args: Any) -> None:
    """See `_flex`. Below a recorder's dispatch mode, vmap, which applies a score function, is
    switched off for this thread: another one computes then. (No mode is active in CUDA captures,
    whose stream is the thread's.)"""
    if not torch._C._dispatch_tls_is_dispatch_key_excluded(_VMAP):
        return _flex(*args)
    with ThreadPoolExecutor(max_workers=1) as other:
        other.submit(_flex, *args).result()


@torch.no_grad()
def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float,
) -> None:
    """q [B, Hq, Q, D], k [B, Hkv, N, D], v [B, Hkv, N, Dv], visible [B, Q, N]."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def score(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap > 0:
            score = softcap * torch.tanh(score / softcap)
        return torch.where(visible[b, i, j], score, -torch.inf)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*without torch.compile", UserWarning)
        rows, aux = flex_attention(
            q, k, v, score, scale=scale, enable_gqa=True, return_aux=AuxRequest(lse=True)
        )
    assert aux.lse is not None  # it was asked for
    out.copy_(rows)
    lse.copy_(aux.lse)


_library.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("graphattn_flex::attend", lambda *args: None, lib=_library)
