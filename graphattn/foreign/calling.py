"""Calling a kernel of others, and bringing what it writes to our conventions."""

from __future__ import annotations

import math

from torch import Tensor

from graphattn.foreign.contract import ForeignAttention
from graphattn.models.contract import AttentionLayer
from graphattn.work import AttentionWork

LN2 = math.log(2)


def attend_by(
    kernel: ForeignAttention,
    q: Tensor,
    keys: Tensor,
    values: Tensor | None,
    work: AttentionWork,
    layer: AttentionLayer,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attend by `kernel`; out and lse are then as `ops.attend` writes them.

    Latent layers have their pool [pages, page_size, D] in `keys` and no `values`. Without an LSE of
    the kernel, lse is left as it is. Which tokens see nothing is known from the metadata, so values
    of NaN or +inf that a token has for another reason stay.
    """
    can = kernel.capabilities
    if values is None:
        kernel.attend_latent(q, keys, work, layer, out, lse)
    else:
        kernel.attend(q, keys, values, work, layer, out, lse)
    if can.lse == "base 2":
        lse.mul_(LN2)
    if not can.exact_empty:
        empty = work.visible_end <= work.visible_start
        out.masked_fill_(empty[:, None, None], 0.0)
        if can.lse != "none" and layer.sinks is None:
            lse.masked_fill_(empty[:, None], -math.inf)
