"""Attention of others on the same data: each from its own installed package, checked, then timed.

`candidates(problem)` lists all of them, and says of each that cannot run why. A call reads what it
needs from a copy in its own layout, made beforehand, and returns [B, Hq, Dv].

Those that need a GPU were written from their documentation and have not run yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graphattn.bounds import ceil_div
from profiles.attention import DecodeAttention

Call = Callable[[], Tensor]
OURS = "graphattn"
WORKSPACE = 256 << 20  # bytes; FlashInfer's documentation asks for 128 MiB


@dataclass(frozen=True, slots=True)
class Peer:
    """An implementation of others; `build` copies the data into its layout."""

    name: str
    module: str  # that holds it
    build: Callable[[Any, DecodeAttention], Call]  # of the imported module and the problem
    heads: bool = True  # attends over K and V
    latent: bool = False  # attends over latents
    gpu: bool = True  # runs on nothing else


@dataclass(frozen=True, slots=True)
class Candidate:
    """A peer that can be timed, or the reason why it cannot."""

    name: str
    call: Call | None
    reason: str | None = None


def candidates(problem: DecodeAttention, names: tuple[str, ...] | None = None) -> list[Candidate]:
    """Ours first, then every peer, or those of `names`. A call is there only if it was right."""
    problem.run()  # the new token's entry is in the pages from here on
    wanted, budget = problem.exact(), problem.budget()
    found = [_checked(OURS, problem.run, wanted, budget)]
    for peer in PEERS:
        if names is None or peer.name in names:
            found.append(_candidate(peer, problem, wanted, budget))
    return found


def _candidate(peer: Peer, problem: DecodeAttention, wanted: Tensor, budget: float) -> Candidate:
    if find_spec(peer.module.partition(".")[0]) is None:
        return Candidate(peer.name, None, "is not installed")
    if peer.gpu and problem.q.device.type != "cuda":
        return Candidate(peer.name, None, "needs a GPU")
    if problem.layer.value_dim and not peer.latent:
        return Candidate(peer.name, None, "has no latent attention")
    if not problem.layer.value_dim and not peer.heads:
        return Candidate(peer.name, None, "has latent attention only")
    try:
        call = peer.build(import_module(peer.module), problem)
    except ImportError as error:
        return Candidate(peer.name, None, f"is not importable: {error}")
    except Exception as error:  # of a foreign package: whatever it is, the others are still timed
        return Candidate(peer.name, None, f"refuses: {error!r}"[:300])
    return _checked(peer.name, call, wanted, budget)


def _checked(name: str, call: Call, wanted: Tensor, budget: float) -> Candidate:
    try:
        got = call()
    except Exception as error:  # as above
        return Candidate(name, None, f"fails: {error!r}"[:300])
    if got.shape != wanted.shape:
        return Candidate(name, None, f"is wrong: gives {list(got.shape)}, not {list(wanted.shape)}")
    off = float((got.double() - wanted).abs().max())
    if not off <= budget:  # also when it is NaN
        return Candidate(name, None, f"is wrong: error {off:.1e}, budget {budget:.1e}")
    return Candidate(name, call)


def _visible(problem: DecodeAttention) -> Tensor | None:
    """[B, 1, 1, N] bool; None where every row fills the cache."""
    if set(problem.lengths) == {problem.max_seq_len}:
        return None
    positions = torch.arange(problem.max_seq_len, device=problem.q.device)
    return (positions < problem.seq_lens[:, None])[:, None, None]


def _sdpa(_: Any, problem: DecodeAttention) -> Call:
    (k, v), q, mask = problem.dense(), problem.q.unsqueeze(2), _visible(problem)
    attend = partial(
        F.scaled_dot_product_attention, scale=problem.layer.scale, attn_mask=mask, enable_gqa=True
    )
    return lambda: attend(q, k, v).squeeze(2)


def _flex(module: Any, problem: DecodeAttention) -> Call:
    """Compiled, with a block mask of the lengths: whole blocks past a row's end are skipped."""
    (k, v), q, lengths = problem.dense(), problem.q.unsqueeze(2), problem.seq_lens

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j < lengths[b]

    batch, cached, device = len(lengths), k.shape[2], str(q.device)
    mask = module.create_block_mask(visible, batch, None, 1, cached, device=device)
    compiled = torch.compile(module.flex_attention, dynamic=False)
    attend = partial(compiled, block_mask=mask, scale=problem.layer.scale, enable_gqa=True)
    return lambda: attend(q, k, v).squeeze(2)


@dataclass(frozen=True, slots=True)
class _Paged:
    """The cache as most others lay it out: [pages, page_size, Hkv, D], row after row."""

    k: Tensor
    v: Tensor
    table: Tensor  # int32 [B, columns]


def _paged(problem: DecodeAttention, page_size: int) -> _Paged:
    columns = ceil_div(problem.max_seq_len, page_size)
    table = torch.arange(len(problem.lengths) * columns, device=problem.q.device).int()

    def pages(dense: Tensor) -> Tensor:
        filled = F.pad(dense, (0, 0, 0, columns * page_size - dense.shape[2]))
        return filled.transpose(1, 2).reshape(-1, page_size, *dense.shape[1::2]).contiguous()

    k, v = problem.dense()
    return _Paged(pages(k), pages(v), table.view(-1, columns))


def _flash_attn(module: Any, problem: DecodeAttention) -> Call:
    cache, q = _paged(problem, 256), problem.q.unsqueeze(1)  # 256: its smallest page
    attend = partial(
        module.flash_attn_with_kvcache,
        cache_seqlens=problem.seq_lens,
        block_table=cache.table,
        softmax_scale=problem.layer.scale,
        causal=True,
    )
    return lambda: attend(q, cache.k, cache.v).squeeze(1)


def _flash_attn_3(module: Any, problem: DecodeAttention) -> Call:
    cache, q = _paged(problem, 64), problem.q.unsqueeze(1)
    attend = partial(
        module.flash_attn_with_kvcache,
        cache_seqlens=problem.seq_lens,
        page_table=cache.table,
        softmax_scale=problem.layer.scale,
        causal=True,
    )
    return lambda: attend(q, cache.k, cache.v).squeeze(1)


def _page_lists(problem: DecodeAttention, cache: _Paged) -> tuple[Tensor, Tensor, Tensor]:
    """Page ids of all rows one after another, where each row's begin, entries of its last page."""
    page_size = cache.k.shape[1]
    counts = (problem.seq_lens + page_size - 1) // page_size
    held = torch.arange(cache.table.shape[1], device=counts.device) < counts[:, None]
    last = (problem.seq_lens - 1) % page_size + 1
    return cache.table[held], F.pad(counts.cumsum(0), (1, 0)).int(), last


def _flashinfer(module: Any, problem: DecodeAttention) -> Call:
    cache, layer, q = _paged(problem, 64), problem.layer, problem.q
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=q.device)
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    indices, indptr, last = _page_lists(problem, cache)
    sizes = (layer.num_q_heads, layer.num_kv_heads, layer.head_dim, cache.k.shape[1])
    wrapper.plan(
        indptr,
        indices,
        last,
        *sizes,
        q_data_type=q.dtype,
        kv_data_type=q.dtype,
        sm_scale=layer.scale,
    )
    return lambda: wrapper.run(q, (cache.k, cache.v))


def _flashinfer_mla(module: Any, problem: DecodeAttention) -> Call:
    cache, layer, q = _paged(problem, 64), problem.layer, problem.q
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=q.device)
    wrapper = module.BatchMLAPagedAttentionWrapper(workspace)
    indices, indptr, _ = _page_lists(problem, cache)
    rope_dim = layer.head_dim - layer.value_dim
    wrapper.plan(
        torch.arange(len(problem.lengths) + 1, device=q.device).int(),
        indptr,
        indices,
        problem.seq_lens,
        layer.num_q_heads,
        layer.value_dim,
        rope_dim,
        cache.k.shape[1],
        False,
        layer.scale,
        q.dtype,
        q.dtype,
    )
    queries = [part.contiguous() for part in q.split([layer.value_dim, rope_dim], dim=-1)]
    latents = cache.k.squeeze(2).split([layer.value_dim, rope_dim], dim=-1)
    caches = [part.contiguous() for part in latents]
    return lambda: wrapper.run(*queries, *caches)


def _flash_mla(module: Any, problem: DecodeAttention) -> Call:
    cache, layer, q = _paged(problem, 64), problem.layer, problem.q.unsqueeze(1)
    lengths = problem.seq_lens
    planned = module.get_mla_metadata(lengths, layer.num_q_heads, 1)  # newer ones ignore these

    def attend() -> Tensor:
        out, _ = module.flash_mla_with_kvcache(
            q,
            cache.k,
            cache.table,
            lengths,
            layer.value_dim,
            *planned,
            softmax_scale=layer.scale,
            causal=True,
        )
        return out.squeeze(1)

    return attend


def _vllm_flash_attn(module: Any, problem: DecodeAttention) -> Call:
    cache, q = _paged(problem, 64), problem.q
    attend = partial(
        module.flash_attn_varlen_func,
        max_seqlen_q=1,
        cu_seqlens_q=torch.arange(len(problem.lengths) + 1, device=q.device).int(),
        max_seqlen_k=max(problem.lengths),
        seqused_k=problem.seq_lens,
        block_table=cache.table,
        softmax_scale=problem.layer.scale,
        causal=True,
    )
    return lambda: attend(q, cache.k, cache.v)


def _vllm_triton(module: Any, problem: DecodeAttention) -> Call:
    cache, q, out = _paged(problem, 64), problem.q, torch.empty_like(problem.q)
    attend = partial(
        module.unified_attention,
        q=q,
        k=cache.k,
        v=cache.v,
        out=out,
        cu_seqlens_q=torch.arange(len(problem.lengths) + 1, device=q.device).int(),
        max_seqlen_q=1,
        seqused_k=problem.seq_lens,
        max_seqlen_k=max(problem.lengths),
        softmax_scale=problem.layer.scale,
        causal=True,
        window_size=(-1, -1),
        block_table=cache.table,
        softcap=0.0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
    )

    def run() -> Tensor:
        attend()
        return out

    return run


PEERS = (
    Peer("sdpa", "torch.nn.functional", _sdpa, latent=True, gpu=False),
    Peer("flex", "torch.nn.attention.flex_attention", _flex, latent=True, gpu=False),
    Peer("flash-attn", "flash_attn", _flash_attn),
    Peer("flash-attn-3", "flash_attn_interface", _flash_attn_3),
    Peer("flashinfer", "flashinfer", _flashinfer),
    Peer("flashinfer-mla", "flashinfer.mla", _flashinfer_mla, heads=False, latent=True),
    Peer("flashmla", "flash_mla", _flash_mla, heads=False, latent=True),
    Peer("vllm-flash-attn", "vllm.vllm_flash_attn", _vllm_flash_attn),
    Peer("vllm-triton", "vllm.v1.attention.ops.triton_unified_attention", _vllm_triton),
)
