"""What the runtime asks of an attention kernel of others, and refuses for what it cannot do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from graphattn.errors import ConfigError, UnsupportedModelError, wrong
from graphattn.models.contract import AttentionLayer
from graphattn.work import AttentionWork

LSE = Literal["natural", "base 2", "none"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a kernel can do, and how it says what ours say otherwise. Unset, it can do little.

    The conformance test holds a kernel to what it claims here.
    """

    lse: LSE = "natural"  # logarithm of the LSE that it writes, "none" when it writes none
    # It writes 0, and an LSE of -inf, for a token that sees nothing. Unset, we do: others leave an
    # LSE of +inf or NaN there, or write nothing.
    exact_empty: bool = False
    host_plan: bool = False  # reads the metadata on the host, step by step
    max_query_len: int | None = None  # places of a decode row; None: any
    prefill: bool = True  # rows of any number of places beside decode rows
    # Ranges that are no causal staircase, ends one after the other, as those of a DCP rank are not.
    shards: bool = False
    windows: bool = False  # ranges that do not start at 0
    softcap: bool = False
    sinks: bool = False
    latent: bool = False  # `attend_latent`

    def __post_init__(self) -> None:
        if self.lse not in get_args(LSE):
            raise wrong("lse", " or ".join(map(repr, get_args(LSE))), self.lse, "Pass one of them.")
        most = self.max_query_len
        if most is not None and (not isinstance(most, int) or most < 1):
            raise wrong("max_query_len", "an integer >= 1, or None for any", most, "Pass 1.")


class ForeignAttention(ABC):
    """An attention kernel of others. Subclass it, set `capabilities`, implement `attend`.

    The runtime writes K and V into the pages before the call. In a captured step the call follows
    the rules of every program there: no host reads, static shapes, memory that stays where it is;
    what a kernel needs as workspace, it allocates once. It is called for every layer, and for every
    DCP rank of the process, one after the other.
    """

    capabilities: Capabilities

    @abstractmethod
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
        """Attention of every token place over [work.visible_start, work.visible_end) of its slot.

        q [T, Hq, D] and the pools [pages, Hkv, page_size, D] may have any strides with a contiguous
        last dimension; `work` and `layer` are described where they are defined. Local position c
        of a row with slot s lies in page work.page_table[s, c // page_size] at c % page_size. Only
        visible entries may matter: others hold NaN, and page-table entries of columns that nobody
        sees hold ids of no page. Writes out [T, Hq, D] in q's dtype and, unless `lse` is "none",
        lse [T, Hq] fp32, both contiguous; places past work.query_start[B] see nothing. Writes
        nothing else.
        """

    def attend_latent(
        self,
        q: Tensor,
        pool: Tensor,
        work: AttentionWork,
        layer: AttentionLayer,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """`attend` over latents; called only with `latent`.

        pool [pages, page_size, D]: of an entry all is key, and the first layer.value_dim values are
        value. out [T, Hq, layer.value_dim].
        """
        raise NotImplementedError(f"{type(self).__name__} has no attend_latent")

    def refusal(self, layer: AttentionLayer, *, page_size: int, dtype: torch.dtype) -> str | None:
        """Why it cannot serve a layer whose pools have this page size and dtype; None: it can."""
        return None


def check_kernel(
    kernel: object,
    layers: Sequence[AttentionLayer],
    *,
    graphs: bool,
    page_size: int,
    dtype: torch.dtype,
    decode_query_len: int,
    dcp_size: int,
) -> ForeignAttention:
    """Raise `ConfigError` or `UnsupportedModelError` for what the kernel cannot serve.

    `graphs`: the steps are captured; `dtype` is that of the pools.
    """
    if not isinstance(kernel, ForeignAttention):
        raise wrong(
            "attention",
            "a graphattn.foreign.ForeignAttention, or None for our kernels",
            type(kernel).__name__,
            "Pass an adapter such as graphattn.foreign.sdpa.SDPA().",
        )
    name, can = type(kernel).__name__, kernel.capabilities
    if can.host_plan and graphs:
        raise ConfigError(
            f"attention: {name} plans on the host in every step, and a graph would repeat the plan "
            "of its capture. Pass backend='eager', or a kernel whose plan is made on the device."
        )
    if can.max_query_len is not None and decode_query_len > can.max_query_len:
        raise ConfigError(
            f"attention: {name} takes at most {can.max_query_len} places of a decode row, and "
            f"{decode_query_len - 1} drafts need {decode_query_len}. Pass speculate with "
            f"k <= {can.max_query_len - 1}, or None."
        )
    if dcp_size > 1 and can.lse == "none":
        raise ConfigError(
            f"attention: {name} returns no LSE, without which the partial attention of {dcp_size} "
            "DCP ranks cannot be combined. Leave out dcp, or use a kernel that returns it."
        )
    if dcp_size > 1 and not can.shards:
        raise ConfigError(
            f"attention: {name} takes causal ranges only, and those of a DCP rank are not. Leave "
            "out dcp, or use a kernel with Capabilities(shards=True)."
        )
    for index, layer in enumerate(layers):
        reason = _layer_refusal(layer, can, dcp_size) or kernel.refusal(
            layer, page_size=page_size, dtype=dtype
        )
        if reason:
            raise UnsupportedModelError(
                f"layer {index}: {name} does not support {reason}. Leave out `attention`."
            )
    return kernel


def _layer_refusal(layer: AttentionLayer, can: Capabilities, dcp_size: int) -> str | None:
    """What of a layer the kernel does not know; sinks of DCP join the union, not a shard."""
    needs = {
        "latent attention": bool(layer.value_dim) and not can.latent,
        f"a sliding window ({layer.window})": bool(layer.window) and not can.windows,
        f"a soft-cap ({layer.softcap})": bool(layer.softcap) and not can.softcap,
        "attention sinks": layer.sinks is not None and not can.sinks and dcp_size == 1,
    }
    return next((what for what, missing in needs.items() if missing), None)
