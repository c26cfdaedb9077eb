"""The operations of a step, each one torch op in the namespace `graphattn`.

Every op writes into buffers of the caller and returns nothing, so its mutation schema is
true, a recorder or an auditor sees one node, and nothing is allocated in a captured step.
`CUDA` runs the Triton kernel `<op>.py`, `CPU` the vectorised `<op>_cpu.py`; both are imported
at the first call, so importing this module needs neither triton nor a GPU. `<op>_ref.py` is
the oracle of both and is never dispatched to. What is fused within a layer is in `fused_ops`.

Legend (all tensors int32 and contiguous unless said):

    B  row places = slots       T  token places of the step     L  logits places
    K  max_drafts               N  stop tokens per request      G  window groups
    S  max_splits               P  page-table width             U  page updates

Slot state outlives a step; it is indexed by slot:

    generation[B]    which use of the slot this is; -1 when it has no request
    finish[B]        0 running, 1 stop token, 2 length, 3 error (NaN logits), 4 no request
    context_len[B]   tokens whose KV is in the cache
    seq_len[B]       tokens in `history`; of a decoding slot always context_len + 1
    prompt_len[B]    tokens that the request was admitted with; the slot is in prefill while
                     context_len < prompt_len
    stop_len[B]      total length at which the request ends, <= max_seq_len
    stop_tokens[B,N] token ids that end it; -1 = unused
    history[B,max_seq_len]  prompt and emitted tokens
    draft_tokens[B,max(K,1)], draft_count[B]   drafts at positions seq_len, seq_len + 1, ...
    page_table[B,P]  page of the local positions [i * page_size, (i + 1) * page_size)

KV pools have the dtype of K and V, or float8_e4m3fn whatever that is. An FP8 entry holds
fp8(x / scale): x / scale rounded to fp32, then to the nearest of the format's values (ties to
even), beyond +-448 to +-448; NaN stays NaN. Reading multiplies by the scale. Scales are fp32 in
device memory, positive and finite; None means 1. Pools of other dtypes take no scales.
"""

from __future__ import annotations

from .library import define

IN_PROMPT = 2**30  # in `occurrences`: the token is in the prompt
COLDEST = 2.0**-64  # temperatures from here to 0 are this one: its reciprocal is finite

admit = define(
    "admit",
    "Tensor admit_generation, Tensor release, Tensor admit_prompt_len, Tensor admit_context_len, "
    "Tensor admit_stop_len, Tensor admit_stop_tokens, Tensor page_updates, "
    "Tensor(a!) generation, Tensor(b!) finish, Tensor(c!) context_len, Tensor(d!) seq_len, "
    "Tensor(e!) prompt_len, Tensor(f!) stop_len, Tensor(g!) stop_tokens, "
    "Tensor(h!) draft_count, Tensor(i!) page_table",
)
"""Apply the host's slot changes of this step to the slot state.

admit_*[B] (stop_tokens [B,N]) and release[B] are indexed by slot, page_updates[U,3] holds
(slot, column, page), slot -1 = unused. For each slot:
  admit_generation >= 0  generation, prompt_len = seq_len, context_len, stop_len, stop_tokens are
                         set, finish = 0, draft_count = 0 (release of the same slot is implied);
  else release != 0      generation = -1, finish = 4, context_len, seq_len, prompt_len, stop_len
                         and draft_count = 0.
Then page_table[slot, column] = page for every used update. A host never sends two updates of
one (slot, column) in a step.
"""

rows_from_lengths = define(
    "rows_from_lengths",
    "Tensor query_len, Tensor context_len, Tensor slot_of_row, Tensor? prefill, "
    "Tensor(a!) row_slot, Tensor(b!) row_query_len, Tensor(c!) slot_context_len, "
    "Tensor(d!) slot_seq_len, Tensor(e!) slot_prompt_len, Tensor(f!) slot_draft_count, "
    "int tokens, int longest, int max_drafts, int max_seq_len",
)
"""The rows and the slot state that `prepare` reads, of a caller who has lengths and no slot state.

query_len, context_len, slot_of_row, prefill [B] are by row, the outputs slot_* [slots] by slot.
Row r gets row_query_len[r] = query_len[r] places, clamped to [0, longest] and cut where the places
of all rows before it and its own exceed `tokens`. row_slot[r] = slot_of_row[r] when that is a slot,
0 <= context_len[r] < max_seq_len and the row has places, else -1. Whatever the caller's tensors
hold, `prepare` then stays within its buffers. Of a row with a slot s, no two rows having the same:
  slot_context_len[s] = context_len[r]
  a row of more than 1 + K places, or with prefill[r] != 0, is a chunk of a prompt that ends with
  it: slot_seq_len[s] = slot_prompt_len[s] = context_len[r] + row_query_len[r], no drafts;
  else a decode row whose places after the first are drafts: slot_seq_len[s] = context_len[r] + 1,
  slot_prompt_len[s] = 0, slot_draft_count[s] = row_query_len[r] - 1.
So a chunk has logits at its last place, a decode row at all of its places. Other slots are left as
they are.
"""

prepare = define(
    "prepare",
    "Tensor slot_of_row, Tensor query_len, "
    "Tensor context_len, Tensor seq_len, Tensor prompt_len, Tensor finish, Tensor history, "
    "Tensor draft_tokens, Tensor draft_count, Tensor page_table, "
    "Tensor(a!) input_ids, Tensor(b!) positions, Tensor(c!) row_of_token, Tensor(d!) kv_slot, "
    "Tensor(e!) visible_start, Tensor(f!) visible_end, Tensor(g!) query_start, "
    "Tensor(h!) token_count, Tensor(i!) logits_start, Tensor(j!) logits_count, "
    "Tensor(k!) logits_token, Tensor(l!) row_begin, Tensor(m!) row_end, Tensor(n!) row_chunk, "
    "Tensor(o!) row_splits, Tensor(p!) decode_items, Tensor(q!) decode_count, "
    "Tensor(r!) prefill_items, Tensor(s!) prefill_count, "
    "int[] windows, int max_drafts, int page_size, int dcp_size, int dcp_rank, int interleave, "
    "int align, int chunk, int max_splits, int prefill_block",
)
"""Derive everything that a step of T token places needs. All outputs are fully rewritten.

Rows: slot_of_row[B] (-1 = padding row), query_len[B] (token places; padding rows 0; the sum is
at most T). query_start[B+1] is the exclusive prefix sum of query_len. Row r has slot s and is
*live* when s >= 0 and finish[s] == 0. `history` and `page_table` can have any row stride: a view of
a history that starts i columns later pairs position p with token p + i, as a multi-token prediction
module wants it.

Tokens: place j of row r has position p = context_len[s] + j and *exists* when the row is live,
p < seq_len[s] + draft_count[s] and p < max_seq_len (= history.shape[1]).
token_count[r] = tokens that exist in row r (they are a prefix of its places). A running slot has
context_len < seq_len and draft_count <= K. For t = query_start[r] + j:
  input_ids[t] int64     history[s, p] if p < seq_len[s] else draft_tokens[s, p - seq_len[s]]
  positions[t] int64     p
  row_of_token[t]        r (for every place of a row, existing or not; -1 past query_start[B])
  kv_slot[t] int64       page_table[s, c // page_size] * page_size + c % page_size with
                         c = local_position(p) where this rank owns p, else -1
  visible_end[t]         local_length(p + 1)
  visible_start[g, t]    0 if windows[g] == 0 else local_length(max(0, p + 1 - windows[g]))
Places without a token: input_ids 0, positions 0, kv_slot -1, visible range [0, 0).

Logits: row r reserves min(query_len[r], 1 + K) consecutive logits places; logits_start[B+1] is
their exclusive prefix sum (the host keeps it <= L). A row *reaches* its end when it is live,
token_count > 0 and context_len + token_count >= seq_len. Then
logits_count[r] = context_len + token_count - (seq_len - 1), else 0, and place i < logits_count[r]
has logits_token[logits_start[r] + i] int64 = query_start[r] + seq_len[s] - 1 + i - context_len[s].
Every other logits place has logits_token 0.

Work lists, one set per window group g for decode; ranges are over existing tokens only:
  row_begin[G,B] = (smallest visible_start[g] of the row) // align * align; 0 without tokens
  row_end[B]     = largest visible_end of the row; 0 without tokens
  span = row_end - row_begin (0 where negative; it can be on a rank whose share is empty)
  a row with query_len > 0 is a *prefill row* if (live ? context_len < prompt_len
                                                  : query_len > 1 + K), else a *decode row*
  row_chunk[G,B] = chunk * 2**n, smallest n with ceil(span / row_chunk) <= max_splits
  row_splits[G,B] = max(1, ceil(span / row_chunk)) for decode rows, 0 for all other rows
  decode_items[G, B*S, 2] = (row, split), rows by min(span, row_chunk) descending then row
      ascending, splits of a row ascending and adjacent; decode_count[G]; unused entries -1
  prefill_items[T // prefill_block + B, 2] = (row, block of prefill_block query places), rows by
      row_end descending then row ascending, blocks of a row *descending* (longest first) and
      adjacent, ceil(query_len / prefill_block) of them; prefill_count[1]; unused entries -1
"""

kv_write = define(
    "kv_write",
    "Tensor k, Tensor v, Tensor kv_slot, Tensor(a!) k_pool, Tensor(b!) v_pool, "
    "Tensor? k_scale=None, Tensor? v_scale=None",
)
"""Write K and V of this step's tokens into the pools.

k, v [T, Hkv, D] (any strides with a contiguous last dimension), kv_slot [T] int64, pools
[num_pages, Hkv, page_size, D] with a contiguous last dimension. Token t goes to page
kv_slot[t] // page_size, offset kv_slot[t] % page_size; -1 writes nothing. k_scale and v_scale of
FP8 pools: [Hkv], or [1] for all heads.
"""

attend = define(
    "attend",
    "Tensor q, Tensor k_pool, Tensor v_pool, Tensor page_table, Tensor slot_of_row, "
    "Tensor query_start, Tensor visible_start, Tensor visible_end, "
    "Tensor row_begin, Tensor row_end, Tensor row_chunk, Tensor row_splits, "
    "Tensor decode_items, Tensor decode_count, Tensor? prefill_items, Tensor? prefill_count, "
    "Tensor? sinks, Tensor(a!) partial_out, Tensor(b!) partial_lse, "
    "Tensor(c!) out, Tensor(d!) lse, "
    "float scale, float softcap, int decode_query_len, int prefill_block, "
    "Tensor? k_scale=None, Tensor? v_scale=None",
)
"""Paged attention of q [T, Hq, D] over each token's visible range; Hq % Hkv == 0.

visible_start [T], visible_end [T], row_begin/row_chunk/row_splits [B], decode_items [B*S, 2],
decode_count [1] belong to the window group of the layer. Scores are
scale * (q . k), then softcap * tanh(score / softcap) when softcap > 0.
Decode items write partials [B, S, decode_query_len, Hq, D] and [B, S, decode_query_len, Hq]
(fp32); a merge writes out [T, Hq, D] (q's dtype) and lse [T, Hq] (fp32, natural log). Prefill
items, when given, write out and lse directly. `prefill_items=None` is a pure decode step.
sinks [Hq] (fp32) join the denominator once, at the end: lse' = logaddexp(lse, sink),
out' = out * exp(lse - lse'). A token with an empty range has out exactly 0 and lse -inf (with
sinks: out 0 and lse = sink), as have all places past query_start[B] (those always -inf).
Nothing is loaded for an empty range; entries of K or V outside visible ranges may be NaN.
k_scale and v_scale of FP8 pools as `kv_write` got them.
"""

latent_write = define(
    "latent_write",
    "Tensor latent, Tensor kv_slot, Tensor(a!) pool, Tensor? latent_scale=None, int value_dim=0",
)
"""Write the latents of this step's tokens into the pool.

latent [T, D] (any row stride, contiguous last dimension), kv_slot [T] int64, pool
[num_pages, page_size, D] with a contiguous last dimension. Token t goes to page
kv_slot[t] // page_size, offset kv_slot[t] % page_size; -1 writes nothing. latent_scale [2] of an
FP8 pool: of an entry's first value_dim values, and of the rest, its rope key.
"""

attend_latent = define(
    "attend_latent",
    "Tensor q, Tensor pool, Tensor page_table, Tensor slot_of_row, "
    "Tensor query_start, Tensor visible_start, Tensor visible_end, "
    "Tensor row_begin, Tensor row_end, Tensor row_chunk, Tensor row_splits, "
    "Tensor decode_items, Tensor decode_count, Tensor? prefill_items, Tensor? prefill_count, "
    "Tensor(a!) partial_out, Tensor(b!) partial_lse, Tensor(c!) out, Tensor(d!) lse, "
    "float scale, int decode_query_len, int prefill_block, Tensor? latent_scale=None, "
    "Tensor? up=None, Tensor(e!)? expanded=None",
)
"""Attention over latents (MLA with W_UK and W_UV absorbed): one entry is K and V of every head.

q [T, Hq, D] (any outer strides), pool [num_pages, page_size, D]; with Dv = out.shape[2] < D, K of
an entry is all of it and V its first Dv values (the compressed KV; the rotated rope key follows).
Scores are scale * (q . entry). out [T, Hq, Dv] in q's dtype, partial_out
[B, S, decode_query_len, Hq, Dv], partial_lse and lse as in `attend`, Hq from 1 to 128. All else is
`attend` without soft-cap and sinks: an empty range has out exactly 0 and lse -inf, both written,
nothing is loaded for it, and entries outside visible ranges may be NaN. latent_scale [2] of an FP8
pool as `latent_write` got it, with value_dim = Dv.

With `up` [Hq, V, Dv], W_UV of each head, values are expanded too: expanded [T, Hq, V] = out of a
head, rounded to q's dtype, times its `up` transposed; exactly 0 where out is. Both have any outer
strides. `out` and `lse` are then memory to work in, without a meaning.
"""

greedy = define("greedy", "Tensor logits, Tensor(a!) sampled")
"""sampled[L] = index of the largest of logits[L, V] (lowest on ties); fp32, bf16 or fp16 with a
contiguous last dimension and any row stride.

-1 where a row has a NaN or no value above -inf: never an id out of range.
"""

commit = define(
    "commit",
    "Tensor sampled, Tensor slot_of_row, Tensor token_count, Tensor logits_start, "
    "Tensor logits_count, Tensor generation, Tensor stop_len, Tensor stop_tokens, "
    "Tensor draft_tokens, Tensor(a!) context_len, Tensor(b!) seq_len, Tensor(c!) finish, "
    "Tensor(d!) history, Tensor(e!) draft_count, Tensor(f!) out_slot, "
    "Tensor(g!) out_generation, Tensor(h!) out_count, Tensor(i!) out_finish, "
    "Tensor(j!) out_context_len, Tensor(k!) out_tokens",
)
"""Accept drafts, append emitted tokens, end requests, and fill the output block.

Row r with slot s >= 0 and finish[s] == 0:
  logits_count[r] == 0: context_len[s] += token_count[r]; nothing is emitted.
  else, with x_i = sampled[logits_start[r] + i] for i < logits_count[r]: emit x_0; while x_i was
  emitted, is no error, did not end the request, i + 1 < logits_count[r] and
  x_i == draft_tokens[s, i], emit x_{i+1}. x_i == -1 ends with finish 3 and is not emitted; an
  emitted stop token ends with 1; seq_len reaching stop_len ends with 2 (a stop token wins).
  Emitted tokens are appended to history; seq_len += emitted; context_len = seq_len - 1
  (when nothing was emitted because of an error: context_len = seq_len - 1 too).
draft_count[s] = 0 for every live row's slot. Output, all [B] but out_tokens [B, 1+K] (-1 past
out_count): out_slot = s, out_generation = generation[s], out_count, out_finish and
out_context_len after the commit. A padding row has slot, generation -1, count 0, finish 4,
context_len 0; a row that was not live has count 0 and its state's finish and context_len.
"""

scale_partial = define(
    "scale_partial",
    "Tensor out, Tensor lse, Tensor lses, Tensor? sinks, Tensor(a!) scaled",
)
"""This rank's term of the attention over all ranks: its output times its share of the weight.

out [T, H, D] and lse [T, H] (fp32) of this rank, lses [W, T, H] (fp32) of all ranks, sinks [H] or
None. With total = logsumexp over ranks (and the sink): scaled = out * exp(lse - total), exactly 0
where lse is -inf. scaled [n, T, H / n, D] in out's dtype: slice i holds heads
[i * H / n, (i + 1) * H / n); n = 1 keeps all heads together. The sum of `scaled` over the ranks is
the attention over the union of their shards.

An LSE, here and in messages, is finite, or -inf for a shard that shows nothing; `out` may be NaN
there. An LSE of NaN (a poisoned request) makes its row NaN. +inf does not occur: kernels of others
that return +inf or NaN for an empty row need an adapter that knows empty rows from the lengths and
maps their LSE to -inf before it gets here; unmapped, +inf makes its row NaN.
"""

pack_partial = define(
    "pack_partial",
    "Tensor out, Tensor lse, Tensor(a!) message, bool by_head",
)
"""One message per destination rank: output rows, each followed by its fp32 LSE.

out [T, H, D], lse [T, H] (fp32), message [W, n, D + 4 / itemsize] in out's dtype; the LSE's four
bytes follow the D values as they are, so a bf16 message carries an fp32 LSE exactly. They are
aligned: D * itemsize is a multiple of 4.
by_head: destination w gets heads [w * H / W, (w + 1) * H / W), n = T * H / W, row t * H / W + h.
Else the T * H rows in order, n = ceil(T * H / W) of them per destination; rows past the end are
out 0 and lse -inf.
"""

merge_packed = define(
    "merge_packed",
    "Tensor message, Tensor? sinks, Tensor(a!) merged, int first_row",
)
"""Attention over all ranks from the packed partials of each.

message [W, n, D + 4 / itemsize] as `pack_partial` writes it, entry w from rank w; merged [n, D] in
its dtype = sum over w of out_w * exp(lse_w - total), total = logsumexp of the lse_w (and the
sink); exactly 0 where every lse is -inf. sinks [Hs] or None: row i belongs to sink
(first_row + i) % Hs.
"""

count_tokens = define(
    "count_tokens",
    "Tensor admit_generation, Tensor admit_prompt_len, Tensor admit_given_len, Tensor history, "
    "Tensor emitted_slot, Tensor emitted_count, Tensor emitted_tokens, Tensor(a!) occurrences",
)
"""Keep the occurrences of every token in every slot, for penalties.

occurrences [B, V] int32, by slot: the number of times the token was emitted, plus IN_PROMPT = 2**30
if it is in the prompt. First the last step's emissions (emitted_slot, emitted_count [B],
emitted_tokens [B, 1 + K]: its output block) are counted: row r with slot s >= 0 adds 1 for each of
its first emitted_count[r] tokens. Then each slot with admit_generation >= 0 is set anew: the prompt
is history[slot, : admit_given_len], and the tokens from there to admit_prompt_len were emitted
before the request was preempted. Run before `admit`'s slots are sampled.
"""

sample = define(
    "sample",
    "Tensor logits, Tensor slot_of_row, Tensor logits_start, Tensor logits_count, "
    "Tensor seq_len, Tensor draft_tokens, Tensor occurrences, "
    "Tensor temperature, Tensor top_k, Tensor top_p, Tensor repetition_penalty, "
    "Tensor presence_penalty, Tensor frequency_penalty, Tensor seed, "
    "Tensor(a!) sampled, Tensor(b!) logprob",
)
"""Draw one token for each logits place of the rows; greedy where temperature is 0.

logits [L, V] (fp32, bf16, fp16; rows may be strided). By slot: temperature, top_p and penalties
[B] fp32, top_k [B] int32 (0 = off), seed [B, 2] int32 (low and high word). Place
i < logits_count[r] of row r with slot s, at logits_start[r] + i, draws the token at position
p = seq_len[s] + i:

    c  = emitted count of the token + its number among draft_tokens[s, : i]
    x  = logit; if c > 0 or the token is in the prompt: x / repetition if x > 0 else x * repetition
    x -= frequency * c + presence * (c > 0)
    temperature 0: sampled = argmax x, the lowest id on ties. Else
    x = (x - max x) * (1 / max(temperature, COLDEST)); 0 at the largest, also if it is infinite
    top_k > 0: keep tokens with x >= the k-th largest x (ties at the threshold stay)
    top_p < 1: of softmax over what is kept, keep tokens with probability >= t, the largest t for
               which the kept mass is >= top_p (ties stay; the most probable token always stays)
    sampled = argmax over kept of x + g, g = -log(-log(1 - w)), the lowest id on ties
    w = (word + 0.5) / 2**32, at most 1 - 2**-24; word = Philox4x32-10 with key (seed low, seed
        high) and counter (token // 4, p, 0, 0), output number token % 4

All of it in fp32, rounded after each operation; w is the word rounded to fp32, plus 0.5, times
2**-32, and log(1 - w) is precise for small w (log1p): the largest noise decides, and a w near 1
would have it in steps of 2**-24. The order of tokens in x, penalties included, is thus the same
everywhere; a sum over the vocabulary and g are not, to the last bit.

So a draw depends on nothing but the request's own seed, position and distribution. logprob [L] fp32
= log softmax of the unmodified logits at the sampled token. A place whose logits hold a NaN or
nothing above -inf has sampled -1 and logprob NaN; places of no row have sampled 0 and logprob 0.
Greedy rows skip the work of sampling.
"""

ngram_draft = define(
    "ngram_draft",
    "Tensor history, Tensor seq_len, Tensor context_len, Tensor stop_len, Tensor finish, "
    "Tensor(a!) draft_tokens, Tensor(b!) draft_count, int min_match, int max_match",
)
"""Prompt lookup: draft what followed the latest earlier occurrence of the last tokens.

By slot, for the K = draft_tokens.shape[1] places: a slot with finish == 0 and context_len ==
seq_len - 1 (it decodes) looks, for n = max_match down to min_match (n < seq_len), for the largest
start j < seq_len - n with history[j : j + n] == history[seq_len - n : seq_len]. At the first n with
a match, draft_count = min(K, stop_len - seq_len - 1, max_seq_len - seq_len) clamped at 0 and
draft_tokens[i] = history[j + n + i % (seq_len - (j + n))] for i < draft_count: an occurrence that
overlaps the tail goes on with its own period. Every other slot has draft_count 0. draft_tokens past
the count are left as they are.
"""
