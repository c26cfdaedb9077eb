"""Operations for an engine of one's own: checked, on memory of the caller, capturable.

    write       kv_write, latent_write         K and V, or latents, into pages of the caller
    attend      attend, attend_latent          over the visible range of each token
    combine     scale_partial, pack_partial, merge_packed     partial attention of DCP ranks
    choose      greedy, sample                 a token for each logits place

Every function checks its arguments from shapes, dtypes, strides and devices, raises `ConfigError`
before anything is written, and then runs one torch op of `graphattn.kernels.ops`, where the
arithmetic is stated. Nothing is allocated or returned, nothing is read on the host, and there is
no backward. What a captured call may see change between replays is every *content*; shapes,
strides, dtypes and the Python numbers are fixed. Tensors stay the caller's.

Legend: T token places, B row places, S splits, Q query places of a decode row, Hq query heads, Hkv
KV heads, D head size, Dv value size of latents. The dtype of q, K, V and outputs is float32,
bfloat16 or float16; metadata is int32 and contiguous unless said.

**FP8.** Pools may be float8_e4m3fn whatever the other dtype is, K and V alike. Their scales, fp32
in device memory, positive and finite, are those of the write; None means 1.

**Pools** have any strides with a contiguous last dimension: one layer of a tensor
[layers, 2, pages, heads, page_size, D], or `pool.transpose(1, 2)` of pages laid out as
[pages, page_size, heads, D]. A page size is any integer >= 1; powers of two from 16 on load whole
blocks from one page, others gather entry by entry. **Page tables** [slots, columns] may be wider
than needed and rows of a wider tensor; entries of columns that nobody sees are never read.

**Aliasing.** Outputs overlap neither inputs nor each other. Several layers can share partials,
outputs and LSE, since one runs after the other. K and V pools may be slices of one tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from graphattn.arguments import (
    FLOATS,
    FP8,
    FP32,
    INT32,
    INT64,
    Arguments,
    check_number,
    check_range,
)
from graphattn.errors import wrong
from graphattn.kernels import ops as raw
from graphattn.kernels.tiles import (
    MAX_HEAD_DIM,
    MAX_LATENT_HEADS,
    MAX_LATENT_ROPE_DIM,
    MAX_LATENT_VALUE_DIM,
)
from graphattn.work import (
    AttentionWork,
    Partials,
    in_schema_order,
    take_pools,
    take_results,
    take_scale,
    take_work,
)

__all__ = [
    "AttentionWork",
    "Partials",
    "SamplingSlots",
    "attend",
    "attend_latent",
    "greedy",
    "kv_write",
    "latent_write",
    "merge_packed",
    "pack_partial",
    "sample",
    "scale_partial",
]


@dataclass(frozen=True, slots=True)
class SamplingSlots:
    """How each slot samples; `graphattn.kernels.ops.sample` states the arithmetic.

    V vocabulary. Contents may change between replays.
    """

    temperature: Tensor  # [B] fp32; 0 = greedy
    top_k: Tensor  # [B]; 0 = off
    top_p: Tensor  # [B] fp32; 1 = off
    repetition_penalty: Tensor  # [B] fp32; 1 = off
    presence_penalty: Tensor  # [B] fp32; 0 = off
    frequency_penalty: Tensor  # [B] fp32; 0 = off
    seed: Tensor  # [B, 2], low and high word
    occurrences: Tensor  # [B, V], emissions of each token, plus 2**30 if it is in the prompt


def kv_write(
    k: Tensor,
    v: Tensor,
    kv_slot: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write K and V of a step's tokens into their pages.

    k, v [T, Hkv, D] (any strides, contiguous last dimension); kv_slot [T] int64: page * page_size
    + offset, -1 writes nothing, no two equal; k_pool, v_pool [pages, Hkv, page_size, D]; scales of
    FP8 pools [Hkv], or [1] for all heads: x / scale is stored.
    """
    args = Arguments()
    args.take("k", k, ("T", "Hkv", "D"), FLOATS)
    args.take("v", v, ("T", "Hkv", "D"), (k.dtype,))
    args.take("kv_slot", kv_slot, ("T",), INT64, "contiguous")
    take_pools(args, k_pool, v_pool, k.dtype, k_scale, v_scale, written=True)
    raw.kv_write(k, v, kv_slot, k_pool, v_pool, k_scale, v_scale)


def latent_write(
    latent: Tensor,
    kv_slot: Tensor,
    pool: Tensor,
    *,
    latent_scale: Tensor | None = None,
    value_dim: int = 0,
) -> None:
    """Write the latents of a step's tokens into their pages.

    latent [T, D] (any row stride); kv_slot [T] int64 as of `kv_write`; pool [pages, page_size, D];
    latent_scale [2] of an FP8 pool: of an entry's first `value_dim` values, and of the rest.
    """
    args = Arguments()
    args.take("latent", latent, ("T", "D"), FLOATS)
    args.take("kv_slot", kv_slot, ("T",), INT64, "contiguous")
    args.take("pool", pool, ("pages", "page_size", "D"), (latent.dtype, FP8), written=True)
    if latent_scale is not None:
        take_scale(args, "latent_scale", latent_scale, (2,), pool)
        check_range("value_dim", "a size", value_dim, args.sizes["D"] - 1)
    raw.latent_write(latent, kv_slot, pool, latent_scale, value_dim)


def attend(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    work: AttentionWork,
    partials: Partials,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Attention of every token over its visible range of the pages.

    q [T, Hq, D] (any outer strides), Hq a multiple of Hkv, D <= 256; k_pool, v_pool
    [pages, Hkv, page_size, D], with scales as of `kv_write`; sinks [Hq] fp32 join the denominator.
    Writes out [T, Hq, D] in q's
    dtype and lse [T, Hq] fp32 (natural log), both contiguous and wholly: a token with an empty
    range gets exactly 0 and -inf (with sinks: 0 and the sink).
    """
    args = Arguments()
    args.take("q", q, ("T", "Hq", "D"), FLOATS)
    take_pools(args, k_pool, v_pool, q.dtype, k_scale, v_scale)
    heads, kv_heads = args.sizes["Hq"], args.sizes["Hkv"]
    if kv_heads == 0 or heads % kv_heads:
        raise wrong("q", f"a multiple of the {kv_heads} KV heads", heads, "Check q's second size.")
    check_range("q", "a head size", args.sizes["D"], MAX_HEAD_DIM)
    if sinks is not None:
        args.take("sinks", sinks, ("Hq",), FP32, "contiguous")
    check_number("scale", scale, above=0.0)
    check_number("softcap", softcap, least=0.0)
    take_work(args, work)
    take_results(args, work, partials, out, lse, "D", q.dtype)
    raw.attend(
        q,
        k_pool,
        v_pool,
        *in_schema_order(work),
        sinks,
        *partials,
        out,
        lse,
        scale,
        softcap,
        work.decode_query_len,
        work.prefill_block,
        k_scale,
        v_scale,
    )


def attend_latent(
    q: Tensor,
    pool: Tensor,
    work: AttentionWork,
    partials: Partials,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    latent_scale: Tensor | None = None,
) -> None:
    """`attend` over latents (MLA, absorbed): an entry is the key of all heads, its first Dv values
    their value.

    q [T, Hq, D], pool [pages, page_size, D], out [T, Hq, Dv], Dv <= 512, D - Dv from 1 to 64,
    Hq <= 128; latent_scale [2] of an FP8 pool as of `latent_write`, with value_dim = Dv. All else
    is `attend` without soft-cap and sinks.
    """
    args = Arguments()
    args.take("q", q, ("T", "Hq", "D"), FLOATS)
    args.take("pool", pool, ("pages", "page_size", "D"), (q.dtype, FP8))
    if latent_scale is not None:
        take_scale(args, "latent_scale", latent_scale, (2,), pool)
    args.take("out", out, ("T", "Hq", "Dv"), (q.dtype,), "contiguous")
    check_range("q", "a number of heads", args.sizes["Hq"], MAX_LATENT_HEADS)
    check_range("out", "a value size Dv", args.sizes["Dv"], MAX_LATENT_VALUE_DIM)
    rope_dim = args.sizes["D"] - args.sizes["Dv"]
    check_range("q", "D - Dv, what is key only,", rope_dim, MAX_LATENT_ROPE_DIM)
    check_number("scale", scale, above=0.0)
    take_work(args, work)
    take_results(args, work, partials, out, lse, "Dv", q.dtype)
    raw.attend_latent(
        q,
        pool,
        *in_schema_order(work),
        *partials,
        out,
        lse,
        scale,
        work.decode_query_len,
        work.prefill_block,
        latent_scale,
    )


def scale_partial(
    out: Tensor, lse: Tensor, lses: Tensor, scaled: Tensor, *, sinks: Tensor | None = None
) -> None:
    """This rank's term of the attention over all ranks; the sum over the ranks is the whole.

    out [T, H, D], lse [T, H] fp32 of this rank, lses [W, T, H] fp32 of all, sinks [H] fp32; all
    contiguous. Writes scaled [n, T, H / n, D] in out's dtype: slice i holds heads
    [i * H / n, (i + 1) * H / n). An LSE is finite or -inf (a shard that shows nothing, whose `out`
    may then be NaN); see `graphattn.foreign` for kernels that say it differently.
    """
    args = Arguments()
    _take_partial(args, out, lse)
    args.take("lses", lses, ("W", "T", "H"), FP32, "contiguous")
    if sinks is not None:
        args.take("sinks", sinks, ("H",), FP32, "contiguous")
    layout = ("n", "T", "H / n", "D")
    args.take("scaled", scaled, layout, (out.dtype,), "contiguous")
    slices, heads = args.sizes["n"], args.sizes["H"]
    if slices * args.sizes["H / n"] != heads:
        raise wrong(
            "scaled",
            f"slices that hold the {heads} heads together",
            list(scaled.shape),
            "Pass [1, T, H, D], or [W, T, H / W, D] for a reduce-scatter.",
        )
    raw.scale_partial(out, lse, lses, sinks, scaled)


def pack_partial(out: Tensor, lse: Tensor, message: Tensor, *, by_head: bool) -> None:
    """One message per destination rank: output rows, each followed by the bytes of its fp32 LSE.

    out [T, H, D], lse [T, H] fp32, both contiguous. Writes message [W, n, D + 4 / itemsize] in
    out's dtype: with `by_head` each rank gets its share of the heads (W divides H,
    n = T * H / W), else its share of the T * H rows (n = ceil(T * H / W)).
    """
    args = Arguments()
    _take_partial(args, out, lse)
    ranks, (tokens, heads, _) = _take_message(args, message, out), out.shape
    if by_head and heads % ranks:
        raise wrong(
            "message", f"ranks that divide {heads} heads", ranks, "Pack rows: by_head=False."
        )
    rows = -(-tokens * heads // ranks)
    if message.shape[1] != rows:
        raise wrong("message", f"{rows} rows a rank", message.shape[1], "Pass [W, n, ...] of n.")
    raw.pack_partial(out, lse, message, by_head)


def merge_packed(
    message: Tensor, merged: Tensor, *, sinks: Tensor | None = None, first_row: int = 0
) -> None:
    """Attention over all ranks, from the packed partials of each.

    message [W, n, D + 4 / itemsize] as `pack_partial` writes it, entry w from rank w; sinks [Hs]
    fp32: row i belongs to sink (first_row + i) % Hs. Writes merged [n, D] in its dtype, exactly 0
    where every LSE is -inf.
    """
    args = Arguments()
    args.take("merged", merged, ("n", "D"), FLOATS, "contiguous")
    _take_message(args, message, merged)
    if sinks is not None:
        args.take("sinks", sinks, ("Hs",), FP32, "contiguous")
    check_number("first_row", first_row, least=0)
    raw.merge_packed(message, sinks, merged, first_row)


def greedy(logits: Tensor, sampled: Tensor) -> None:
    """The id of the largest of each row of logits [L, V] (any row stride), lowest on ties.

    Writes sampled [L] int32; -1 where a row holds a NaN or nothing above -inf: never an id out of
    range.
    """
    args = Arguments()
    args.take("logits", logits, ("L", "V"), FLOATS)
    args.take("sampled", sampled, ("L",), INT32, "contiguous")
    raw.greedy(logits, sampled)


def sample(
    logits: Tensor,
    slot_of_row: Tensor,
    logits_start: Tensor,
    logits_count: Tensor,
    seq_len: Tensor,
    draft_tokens: Tensor,
    slots: SamplingSlots,
    sampled: Tensor,
    logprob: Tensor,
) -> None:
    """Draw a token for each logits place, from its request's own seed and position alone.

    logits [L, V] (any row stride); slot_of_row [B]; logits_start [B + 1], logits_count [B]: places
    of a row; by slot seq_len [B], tokens before the first drawn one, and draft_tokens [B, K],
    verified in order. Writes sampled [L] int32 (-1 where the logits hold a NaN) and logprob [L]
    fp32, of the unmodified logits.
    """
    args = Arguments()
    args.take("logits", logits, ("L", "V"), FLOATS)
    args.take("slot_of_row", slot_of_row, ("B",), INT32, "contiguous")
    rows = args.sizes["B"]
    args.take("logits_start", logits_start, (rows + 1,), INT32, "contiguous")
    args.take("logits_count", logits_count, ("B",), INT32, "contiguous")
    args.take("seq_len", seq_len, ("B",), INT32, "contiguous")
    args.take("draft_tokens", draft_tokens, ("B", "K"), INT32, "contiguous")
    args.take("slots.occurrences", slots.occurrences, ("B", "V"), INT32, "contiguous")
    args.take("slots.top_k", slots.top_k, ("B",), INT32, "contiguous")
    args.take("slots.seed", slots.seed, ("B", 2), INT32, "contiguous")
    floats = ("temperature", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    for name in floats:
        args.take(f"slots.{name}", getattr(slots, name), ("B",), FP32, "contiguous")
    args.take("sampled", sampled, ("L",), INT32, "contiguous")
    args.take("logprob", logprob, ("L",), FP32, "contiguous")
    raw.sample(
        logits,
        slot_of_row,
        logits_start,
        logits_count,
        seq_len,
        draft_tokens,
        slots.occurrences,
        slots.temperature,
        slots.top_k,
        slots.top_p,
        slots.repetition_penalty,
        slots.presence_penalty,
        slots.frequency_penalty,
        slots.seed,
        sampled,
        logprob,
    )


def _take_partial(args: Arguments, out: Tensor, lse: Tensor) -> None:
    args.take("out", out, ("T", "H", "D"), FLOATS, "contiguous")
    args.take("lse", lse, ("T", "H"), FP32, "contiguous")


def _take_message(args: Arguments, message: Tensor, like: Tensor) -> int:
    """Check a message of rows like those of `like`; the number of ranks."""
    dim, per_lse = args.sizes["D"], 4 // like.itemsize
    if dim * like.itemsize % 4:
        raise wrong("D", "rows of a multiple of 4 bytes", dim, "An odd bf16 row misaligns the LSE.")
    layout = ("W", "rows", dim + per_lse)
    args.take("message", message, layout, (like.dtype,), "contiguous")
    if args.sizes["W"] == 0:
        raise wrong("message", "at least one rank", 0, "Pass [W, n, D + 4 / itemsize].")
    return args.sizes["W"]
