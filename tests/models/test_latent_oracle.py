"""The swapped attention over paged latents, against the formula as DeepSeek's papers write it.

The oracle is float64, expands every latent to keys and values of every head, and is written from
the weights alone. Its error budget is the error that transformers' own module makes in the same
dtype, plus the rounding of the result: twice, since W_UK is applied elsewhere.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphattn import DCP, VirtualGroup
from graphattn.models.contract import ModelStep
from graphattn.models.transformers import Runner, TransformersModel, adapt
from tests.models.latent_families import YARN, tiny_latent
from tests.runtime.serving import make_engine

LENGTH = 45


class FirstAttention(nn.Module):
    """Embedding and first attention of an adapted model as a model of its own; keeps what it gave.

    Its vocabulary are the values of the attention's output.
    """

    eos_token_ids = ()

    def __init__(self, adapted: TransformersModel) -> None:
        super().__init__()
        inner = adapted.module.model
        self.embed, self.rotary = inner.embed_tokens, inner.rotary_emb
        self.attention = inner.layers[0].self_attn
        self.attention_layers = adapted.attention_layers[:1]
        self.vocab_size = self.embed.weight.shape[1]
        self.max_seq_len = adapted.max_seq_len
        self.dtype, self.device = adapted.dtype, adapted.device
        self.expected = adapted._expected
        self.given: dict[int, Tensor] = {}  # by position

    def __call__(self, step: ModelStep) -> Tensor:
        x = self.embed(step.input_ids).unsqueeze(0)
        out, _ = self.attention(
            hidden_states=x,
            position_embeddings=self.rotary(x, step.positions.unsqueeze(0)),
            attention_mask=None,
            position_ids=step.positions.unsqueeze(0),
            graphattn_caller=Runner(step, self.expected),
        )
        for position, row in zip(step.positions.tolist(), out[0], strict=True):
            self.given.setdefault(position, row.clone())
        return out[0][step.logits_token]


def oracle(attention: Any, x: Tensor, scale: float, inv_freq: Tensor, factor: float) -> Tensor:
    """Attention output [T, hidden] of hidden states x [T, hidden], all float64.

    `factor` is what YaRN multiplies cosine and sine with.
    """
    weights = {name: p.double() for name, p in attention.named_parameters()}
    heads, nope, rope = (
        attention.num_heads,
        attention.qk_nope_head_dim,
        attention.qk_rope_head_dim,
    )

    def linear(name: str, y: Tensor) -> Tensor:
        bias = weights.get(f"{name}.bias")
        return y @ weights[f"{name}.weight"].T + (0 if bias is None else bias)

    def norm(name: str, y: Tensor) -> Tensor:
        mean = y.square().mean(-1, keepdim=True)
        return y / (mean + 1e-6).sqrt() * weights[f"{name}.weight"]

    def rotate(y: Tensor) -> Tensor:
        """Pairs (y0, y1), (y2, y3), ... as complex numbers, turned by position * frequency."""
        angle = torch.arange(len(y), dtype=torch.float64)[:, None] * inv_freq.double()
        turn = torch.polar(torch.full_like(angle, factor), angle)
        pairs = torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous())
        turned = pairs * (turn if y.dim() == 2 else turn.unsqueeze(1))
        return torch.view_as_real(turned).flatten(-2)

    if "q_proj.weight" in weights:
        q = linear("q_proj", x)
    else:
        q = linear("q_b_proj", norm("q_a_layernorm", linear("q_a_proj", x)))
    q = q.unflatten(-1, (heads, nope + rope))
    c, r = linear("kv_a_proj_with_mqa", x).split([attention.kv_lora_rank, rope], -1)
    kv = linear("kv_b_proj", norm("kv_a_layernorm", c)).unflatten(-1, (heads, -1))
    scores = torch.einsum("qhd,khd->hqk", q[..., :nope], kv[..., :nope])
    scores = scores + torch.einsum("qhd,kd->hqk", rotate(q[..., nope:]), rotate(r))
    later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    weight = (scale * scores).masked_fill(later, -math.inf).softmax(-1)
    out = torch.einsum("hqk,khd->qhd", weight, kv[..., nope:])
    return linear("o_proj", out.flatten(1))


def whole(attention: Any, rotary: Any, x: Tensor) -> Tensor:
    """What transformers' own module gives for the whole sequence."""
    positions = torch.arange(len(x)).unsqueeze(0)
    later = torch.full((len(x), len(x)), -math.inf, dtype=x.dtype).triu(1)[None, None]
    embedded = rotary(x.unsqueeze(0), positions)
    out, _ = attention(
        hidden_states=x.unsqueeze(0), position_embeddings=embedded, attention_mask=later
    )
    return out[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["deepseek-v3", "deepseek-v3-yarn", "deepseek-v2"])
@pytest.mark.parametrize("W", [1, 3])
@torch.no_grad()
def test_output_is_that_of_the_expanded_formula(family: str, dtype: torch.dtype, W: int) -> None:
    """Prefill in chunks, then decode, over pages of 4 and ranks of 2 tokens."""
    model = tiny_latent(family).to(dtype)
    probe = FirstAttention(adapt(model))
    prompt = torch.randint(48, (LENGTH - 6,), generator=torch.Generator().manual_seed(5)).tolist()
    dcp = None if W == 1 else DCP(VirtualGroup(W), 2)
    with make_engine(probe, backend="eager", max_batch=1, dcp=dcp) as engine:
        probe.given.clear()  # of warm-up
        request = engine.submit(prompt, max_new_tokens=6)
        while engine.busy:
            engine.step()
    token_ids = torch.tensor([*prompt, *request.token_ids][:-1])
    given = torch.stack([probe.given[p] for p in range(len(token_ids))])

    attention, rotary = model.model.layers[0].self_attn, model.model.rotary_emb
    x = model.model.embed_tokens(token_ids)
    scale, factor = 18**-0.5, 1.0
    if family == "deepseek-v3-yarn":
        grown = [0.1 * YARN[name] * math.log(YARN["factor"]) + 1.0 for name in _MSCALES]
        scale, factor = scale * grown[1] ** 2, grown[0] / grown[1]
    want = oracle(attention, x.double(), scale, rotary.inv_freq, factor)
    own = (whole(attention, rotary, x).double() - want).abs().max()
    budget = 2 * (own + torch.finfo(dtype).eps * want.abs().max())
    assert (given.double() - want).abs().max() <= budget
    assert want.std() > 0.1


_MSCALES = ("mscale", "mscale_all_dim")
