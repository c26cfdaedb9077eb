"""Oracle of `rope_write`: what becomes of Q and K, float64, nothing rounded."""

from __future__ import annotations

from torch import Tensor

from .rms_norm_ref import rms_norm_ref
from .rotary_ref import rotate_ref


def rope_write_ref(
    q: Tensor,
    k: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    style: str,
    *,
    pairs_in: bool,
    pairs_out: bool,
) -> tuple[Tensor, Tensor]:
    """Exact Q [T, Hq, D] and K [T, Hkv, D], float64 on the CPU. `kv_write_ref` writes."""
    heads = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        x = x.double().cpu() if weight is None else rms_norm_ref(x, weight, eps, style)
        if cos is not None and sin is not None:
            x = rotate_ref(x, cos, sin, pairs_in=pairs_in, pairs_out=pairs_out)
        heads.append(x)
    return heads[0], heads[1]
