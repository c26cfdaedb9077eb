"""torch's scaled_dot_product_attention over gathered pages, with a mask from the visible ranges.

Runs wherever torch does. It returns no LSE, so it serves no DCP group.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from graphattn.foreign.contract import Capabilities
from graphattn.foreign.gather import DenseAttention, scatter
from graphattn.models.contract import AttentionLayer
from graphattn.work import AttentionWork


class SDPA(DenseAttention):
    """See the module. Cost and memory follow rows x places x max_seq_len, whatever is seen."""

    capabilities = Capabilities(lse="none", windows=True, latent=True)

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
        rows = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible[:, None], scale=layer.scale, enable_gqa=True
        )
        out.copy_(scatter(rows.transpose(1, 2), out.shape[0], work))
