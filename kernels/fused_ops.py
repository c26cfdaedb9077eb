"""What is fused within a layer of a model: fewer nodes in a step's graph, the same rounding.

Defined as those of `ops`: each is one torch op that writes into tensors of the caller. Each stands
for a handful of a model's own operations and rounds where they round, so that tokens stay the
model's own.

Legend: T token places, H hidden size, Hq query heads, Hkv KV heads, D head size, R rotated values
of a head, C values of a latent before its rope key, I intermediate size.

Values, weights and outputs have one dtype, fp32, bf16 or fp16, the model's. Tensors have any outer
strides, so that parts of a concatenated projection are taken as they lie; last dimensions are
contiguous unless said. Arithmetic is fp32; *rounded* means to the model's dtype. Results at padding
places follow from what lies there; nothing is written for them to a pool.

**Norm** of x over its n values, by `style`, with z = x * rsqrt(mean of x**2 + eps):

    "rounded"  rounded(weight * rounded(z))        Llama, Qwen, Mistral, DeepSeek
    "wide"     rounded(weight * z)                 OLMo 2, gpt-oss
    "offset"   rounded((1 + weight) * z)           Gemma

**Rotation** of R values by R / 2 angles: pair i is (x[i], x[i + R / 2]), or (x[2 i], x[2 i + 1])
where `pairs_in`; it becomes (a cos - b sin, b cos + a sin), which goes to i and i + R / 2, or to
2 i and 2 i + 1 where `pairs_out`. cos and sin [T, R / 2] have any strides, also in the last
dimension: of a model that repeats each angle they are one half, or every second. In the model's
dtype, each product and the sum are rounded; in fp32, only the result is.
"""

from __future__ import annotations

from .library import define

add_rms_norm = define(
    "add_rms_norm",
    "Tensor x, Tensor? residual, Tensor? x_weight, Tensor weight, "
    "Tensor(a!) normed, Tensor(b!)? summed, float eps, str style",
)
"""Add what a block computed to the residual, and norm the sum for the next block.

x, normed [T, H], residual and summed [T, H], both given or both None; weight, x_weight [H].
y = norm(x, x_weight), or x without x_weight; summed = rounded(residual + y); normed =
norm(summed, weight), norm(y, weight) without a residual. `summed` may be `residual` or `x`, and
`normed` may be `x`.
"""

rope_write = define(
    "rope_write",
    "Tensor q, Tensor k, Tensor v, Tensor? cos, Tensor? sin, Tensor? q_weight, Tensor? k_weight, "
    "Tensor kv_slot, Tensor(a!) q_out, Tensor(b!) k_pool, Tensor(c!) v_pool, "
    "Tensor? k_scale, Tensor? v_scale, float eps, str style, bool pairs_in, bool pairs_out",
)
"""Norm each head of Q and K, rotate, and write K and V into the pools.

q, q_out [T, Hq, D], k, v [T, Hkv, D]. With q_weight and k_weight [D] (both or neither) each head is
normed first. The first R = 2 * cos.shape[1] <= D values of a head are rotated, the others pass; so
do all without cos and sin. q_out is written for every place and does not overlap `q`. K and V go to
the pools as with `ops.kv_write`.
"""

latent_norm_write = define(
    "latent_norm_write",
    "Tensor? q, Tensor? q_weight, Tensor(a!)? q_out, Tensor latent, Tensor cos, Tensor sin, "
    "Tensor weight, Tensor kv_slot, Tensor(b!) pool, Tensor? latent_scale, "
    "float eps, str style, bool pairs_in, bool pairs_out",
)
"""Norm and rotate the latents, write them into the pool, and norm a query's low-rank part.

latent [T, C + R], weight [C]: the first C values of a latent are normed, its R others are rotated;
it goes to the pool [num_pages, page_size, C + R] as with `ops.latent_write`, value_dim = C.
q, q_out [T, N], q_weight [N], all three or none: q_out = norm(q), at every place; it may be `q`.
"""

absorb_query = define(
    "absorb_query",
    "Tensor q, Tensor up, Tensor cos, Tensor sin, Tensor(a!) q_out, bool pairs_in, bool pairs_out",
)
"""Queries in the space of the latents: the product with a head's W_UK, and the rotated rest.

q [T, Hq, N + R], up [Hq, N, C], q_out [T, Hq, C + R]: its first C values of a head are the first N
of q times `up`, rounded once, its R others those of q, rotated.
"""

gated_mul = define(
    "gated_mul",
    "Tensor gate, Tensor up, Tensor(a!) out, str activation",
)
"""out = rounded(rounded(activation(gate)) * up), all [T, I]; `out` may be `gate` or `up`.

activation: "silu", x / (1 + exp(-x)), or "gelu_tanh",
x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))).
"""
