"""Attention of others is timed only where it was right, and listed in any case."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from profiles import peers
from profiles.attention import DecodeAttention, decode_attention, gqa, latent

LENGTHS = (70, 1, 64, 33)
LAYERS = {"gqa": gqa(9, 3, 16), "latent": latent(5, 48, 40)}


def problem(
    kind: str = "gqa", lengths: tuple[int, ...] = LENGTHS, **options: Any
) -> DecodeAttention:
    where = {"dtype": torch.float32, "device": torch.device("cpu"), "page_size": 16}
    return decode_attention(LAYERS[kind], lengths, **where | options)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("options", [{}, {"max_seq_len": 150}, {"lengths": (40, 40)}], ids=str)
def test_ours_and_sdpa_are_right_and_the_others_say_why_not(
    kind: str, options: dict[str, Any]
) -> None:
    ours, sdpa, *others = peers.candidates(problem(kind, **options), ("sdpa", "flashinfer"))
    assert (ours.name, ours.reason, sdpa.name, sdpa.reason) == ("graphattn", None, "sdpa", None)
    assert [(c.name, c.call) for c in others] == [("flashinfer", None)]
    assert others[0].reason in ("is not installed", "needs a GPU")


def test_no_peer_is_dropped() -> None:
    asked = tuple(peer.name for peer in peers.PEERS if peer.name != "flex")  # compiles: see below
    assert [c.name for c in peers.candidates(problem(), asked)] == ["graphattn", *asked]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler, about this machine
@pytest.mark.parametrize("kind", LAYERS)
def test_compiled_flex_is_right(kind: str) -> None:
    assert [c.reason for c in peers.candidates(problem(kind), ("flex",))] == [None, None]


def off_by(error: float) -> peers.Peer:
    def build(_: Any, problem: DecodeAttention) -> peers.Call:
        return lambda: problem.exact() + error

    return peers.Peer("mine", "torch", build, gpu=False)


def refusing(_: Any, problem: DecodeAttention) -> peers.Call:
    raise ValueError("page size")


@pytest.mark.parametrize(
    ("peer", "reason"),
    [
        (off_by(0.0), None),
        (off_by(1e-4), "is wrong: error 1.0e-04"),
        (off_by(float("nan")), "is wrong: error nan"),
        (replace(off_by(0.0), build=lambda m, p: lambda: p.exact()[:1]), "is wrong: gives [1, 9"),
        (replace(off_by(0.0), build=lambda m, p: lambda: 1 / 0), "fails: ZeroDivisionError"),
        (replace(off_by(0.0), build=refusing), "refuses: ValueError('page size')"),
        (replace(off_by(0.0), module="torch.no_such_module"), "is not importable: No module"),
        (replace(off_by(0.0), module="no_such_package"), "is not installed"),
        (replace(off_by(0.0), gpu=True), "needs a GPU"),
        (replace(off_by(0.0), heads=False, latent=True), "has latent attention only"),
    ],
)
def test_a_peer_that_is_not_right_is_not_timed(
    peer: peers.Peer, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "PEERS", (peer,))
    _, found = peers.candidates(problem())
    assert (found.call is None) == (found.reason is not None) == (reason is not None)
    assert (found.reason or "").startswith(reason or "")


def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """q [B, Hq, D] over pages [pages, page_size, Hkv, D], as most others lay them out."""
    rows = []
    for row, length in enumerate(lengths.tolist()):
        held = [x[table[row].long()].flatten(0, 1)[:length].transpose(0, 1)[None] for x in (k, v)]
        query = q[row][None, :, None]
        rows.append(F.scaled_dot_product_attention(query, *held, scale=scale, enable_gqa=True))
    return torch.cat(rows).squeeze(2)


class FlashInfer:
    """The two wrappers, as documented: planned with lists of pages."""

    def __init__(self, workspace: Tensor, layout: str = "NHD", use_tensor_cores: bool = False):
        assert workspace.dtype == torch.uint8
        assert layout == "NHD"

    def plan(self, indptr: Tensor, indices: Tensor, *rest: Any, **options: Any) -> None:
        self.planned = (indptr, indices, *rest)
        self.options = options

    def run(self, q: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        indptr, indices, last, *sizes = self.planned
        assert sizes == [*q.shape[1:2], cache[0].shape[2], q.shape[2], cache[0].shape[1]]
        lengths = (indptr.diff() - 1) * cache[0].shape[1] + last
        return attend(q, *cache, padded(indptr, indices), lengths, self.options["sm_scale"])


class FlashInferMLA(FlashInfer):
    def run(self, q: Tensor, q_rope: Tensor, latents: Tensor, ropes: Tensor) -> Tensor:  # type: ignore[override]
        rows, indptr, indices, lengths, heads, dim, rope_dim, page_size, _causal, scale, *_ = (
            self.planned
        )
        assert rows.tolist() == list(range(len(q) + 1))
        assert (heads, dim, rope_dim, page_size) == (*q.shape[1:], ropes.shape[2], ropes.shape[1])
        keys = torch.cat([latents, ropes], -1).unsqueeze(2)
        queries = torch.cat([q, q_rope], -1)
        values = latents.unsqueeze(2)
        return attend(queries, keys, values, padded(indptr, indices), lengths, scale)


def padded(indptr: Tensor, indices: Tensor) -> Tensor:
    rows = indices.split(indptr.diff().tolist())
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cache_seqlens: Tensor,
    softmax_scale: float,
    causal: bool,
    block_table: Tensor | None = None,
    page_table: Tensor | None = None,
) -> Tensor:
    table = block_table if page_table is None else page_table
    assert table is not None
    assert block_table is None or k.shape[1] % 256 == 0
    return attend(q.squeeze(1), k, v, table, cache_seqlens, softmax_scale).unsqueeze(1)


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    block_table: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
) -> Tensor:
    assert cu_seqlens_q.tolist() == list(range(len(q) + 1))
    assert (max_seqlen_q, max_seqlen_k) == (1, int(seqused_k.max()))
    return attend(q, k, v, block_table, seqused_k, softmax_scale)


def unified(*, q: Tensor, k: Tensor, v: Tensor, out: Tensor, **options: Any) -> None:
    for name in ("window_size", "softcap", "q_descale", "k_descale", "v_descale"):
        del options[name]
    out.copy_(varlen(q, k, v, **options))


def flash_mla(
    q: Tensor,
    cache: Tensor,
    table: Tensor,
    lengths: Tensor,
    value_dim: int,
    planned: str,
    splits: None,
    *,
    softmax_scale: float,
    causal: bool,
) -> tuple[Tensor, None]:
    assert (planned, splits) == ("planned", None)
    values = cache[..., :value_dim]
    return attend(q.squeeze(1), cache, values, table, lengths, softmax_scale).unsqueeze(1), None


STANDINS = {
    "flash-attn": SimpleNamespace(flash_attn_with_kvcache=flash_attn),
    "flash-attn-3": SimpleNamespace(flash_attn_with_kvcache=flash_attn),
    "flashinfer": SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=FlashInfer),
    "flashinfer-mla": SimpleNamespace(BatchMLAPagedAttentionWrapper=FlashInferMLA),
    "flashmla": SimpleNamespace(
        flash_mla_with_kvcache=flash_mla, get_mla_metadata=lambda *_: ("planned", None)
    ),
    "vllm-flash-attn": SimpleNamespace(flash_attn_varlen_func=varlen),
    "vllm-triton": SimpleNamespace(unified_attention=unified),
}


@pytest.mark.parametrize("peer", [p for p in peers.PEERS if p.gpu], ids=lambda p: p.name)
def test_what_gpu_peers_are_given(peer: peers.Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins with the documented arguments of each, in plain torch, give the right result."""
    monkeypatch.setattr(peers, "WORKSPACE", 8)
    case = problem("gqa" if peer.heads else "latent", max_seq_len=300)
    case.run()
    got = peer.build(STANDINS[peer.name], case)()
    assert float((got.double() - case.exact()).abs().max()) <= case.budget()
