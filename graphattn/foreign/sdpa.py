"""torch's scaled_dot_product_attention over gathered pages, with a mask from the visible ranges.

Runs wherever torch does. It returns no LSE, so it serves no DCP group.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from graphattn.foreign.contract import Capabilities, ForeignAttention
from graphattn.foreign.gather import gather, scatter
from graphattn.models.contract import AttentionLayer
from graphattn.work import AttentionWork


class SDPA(ForeignAttention):
    """See the module. Cost and memory follow rows x places x max_seq_len, whatever is seen."""

    capabilities = Capabilities(lse="none", windows=True, latent=True)

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
        """See `ForeignAttention`."""
        rows, (k, v), visible = gather(q, (k_pool, v_pool), work)
        self._write(rows, k, v, visible, work, layer, out)

    def attend_latent(
        self,
        q: Tensor,
        pool: Tensor,
        work: AttentionWork,
        layer: AttentionLayer,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """See `ForeignAttention`."""
        rows, (latent,), visible = gather(q, (pool.unsqueeze(1),), work)
        self._write(rows, latent, latent[..., : layer.value_dim], visible, work, layer, out)

    def refusal(self, layer: AttentionLayer, *, page_size: int, dtype: torch.dtype) -> str | None:
        """See `ForeignAttention`."""
        return "FP8 pages" if dtype == torch.float8_e4m3fn else None

    def _write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: Tensor,
        work: AttentionWork,
        layer: AttentionLayer,
        out: Tensor,
    ) -> None:
        rows = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible[:, None], scale=layer.scale, enable_gqa=True
        )
        out.copy_(scatter(rows.transpose(1, 2), out.shape[0], work))
