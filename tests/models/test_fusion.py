"""What is fused of each family, that it computes the same, and what is left alone and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_layers import MtpModel

import graphattn
from graphattn.models.fusion.norms import Norm
from graphattn.models.mtp import adapt_mtp
from graphattn.models.transformers import TransformersModel, adapt
from tests.models.dense_step import DenseStep
from tests.models.families import FAMILIES, VOCAB, tiny
from tests.models.latent_families import LATENT_FAMILIES, tiny_latent

ROPE, LATENT = "rotation + KV write", "latent norm + rotation + write"
GATE, NORM, ADD, JOIN = "gate * up", "norm", "residual + norm", "joined linears"

_WHOLE = {GATE: 2, ROPE: 2, NORM: 5, ADD: 2, JOIN: 4}
_EXPERTS = {ROPE: 2, NORM: 5, ADD: 2, JOIN: 2}
_LATENT = {GATE: 3, LATENT: 3, NORM: 7, ADD: 3, JOIN: 6}

# family -> what is fused in two or three layers; what is not listed is not.
FUSED: dict[str, dict[str, int]] = {
    "llama": _WHOLE,
    "llama-rope3": _WHOLE,
    "qwen2": _WHOLE,
    "qwen3": _WHOLE,
    "mistral": _WHOLE,
    "smollm3": _WHOLE,
    "granite": _WHOLE,
    "phi3": {GATE: 2, ROPE: 2, NORM: 5, ADD: 2},  # its projections are joined already
    "gemma2": {GATE: 2, ROPE: 2, NORM: 9, ADD: 2, JOIN: 4},
    "gemma3": {GATE: 3, ROPE: 3, NORM: 13, ADD: 3, JOIN: 6},
    "glm4": {GATE: 2, ROPE: 2, NORM: 9, ADD: 2, JOIN: 2},
    "qwen3-moe": _EXPERTS,
    "mixtral": _EXPERTS,
    "gpt-oss": _EXPERTS,
    "olmo2": {GATE: 2, NORM: 9, JOIN: 2},
    "cohere2": {GATE: 2, ROPE: 2, JOIN: 4},
    "starcoder2": {ROPE: 2, JOIN: 2},
    "gpt2": {},
    "gpt-neox": {},
    "deepseek-v3": _LATENT,
    "deepseek-v3-halves": _LATENT,
    "deepseek-v2": _LATENT,
    "glm4-moe-lite": _LATENT,
    "youtu": _LATENT,
    "deepseek-v2-lite": _LATENT,
    "deepseek-v3-yarn": {GATE: 3, LATENT: 3, NORM: 7, ADD: 3, JOIN: 3},
    "axk1": {GATE: 3, LATENT: 3, NORM: 9, ADD: 3, JOIN: 6},
    "minicpm3": {GATE: 3, LATENT: 3, NORM: 7, JOIN: 6},
    "mistral4": {GATE: 3, NORM: 13, ADD: 3, JOIN: 3},
}
# A complex product rounds in another order than two real ones.
NOT_BITWISE = {"deepseek-v2", "deepseek-v2-lite"}


def tiny_any(family: str, **options: Any) -> Any:
    make = tiny if family in FAMILIES else tiny_latent
    return make(family, **options)


@torch.no_grad()
def logits(model: TransformersModel, tokens: int = 23) -> Tensor:
    ids = torch.randint(VOCAB, (tokens,), generator=torch.Generator().manual_seed(5))
    return model(DenseStep(ids, model.attention_layers))


def fused(model: TransformersModel) -> dict[str, int]:
    assert model.fusion is not None
    return model.fusion.counts


def reasons(model: Any) -> str:
    return "\n".join(note for note in adapt(model).notes if note.startswith("not fused"))


def test_every_family_is_listed() -> None:
    assert FUSED.keys() == FAMILIES.keys() | LATENT_FAMILIES.keys()


@pytest.mark.parametrize("family", FUSED)
def test_fused_as_listed_and_equal_to_unfused(family: str) -> None:
    model = tiny_any(family)
    plain, swapped = adapt(model, fuse=False), adapt(model)
    assert fused(swapped) == FUSED[family]
    assert plain.fusion is None
    want, got = logits(plain), logits(swapped)
    if family in NOT_BITWISE:
        assert (got - want).abs().max() <= 64 * torch.finfo(want.dtype).eps * want.abs().max()
    else:
        assert torch.equal(got, want)
    norms = [vars(x).get("forward") for x in swapped.module.modules()]
    assert all(x._handed is None for x in norms if isinstance(x, Norm)), "nothing outlives a step"


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-oss", "cohere2", "glm4", "deepseek-v3"])
def test_bfloat16_rounds_where_the_model_rounds(family: str) -> None:
    model = tiny_any(family).bfloat16()
    swapped = adapt(model)
    assert fused(swapped) == FUSED[family]
    assert torch.equal(logits(swapped), logits(adapt(model, fuse=False)))


def test_notes_list_what_is_fused_and_what_is_not() -> None:
    assert adapt(tiny("llama")).notes == (
        "fused: gate * up 2, rotation + KV write 2, norm 5, residual + norm 2, joined linears 4",
    )
    assert adapt(tiny("gpt2")).notes == (
        "fused: nothing",
        "not fused: norm: LayerNorm is no RMS norm (x 5)",
    )
    assert adapt(tiny("llama"), fuse=False).notes == ()


def _with_hook(attention: Any, mlp: Any) -> None:
    attention.q_proj.register_forward_hook(lambda *args: None)


def _with_adapter(attention: Any, mlp: Any) -> None:
    class Adapted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    attention.k_proj.__class__ = Adapted


def _spread(attention: Any, mlp: Any) -> None:
    """As tensor parallelism leaves it: a tensor of another class in the parameter's place."""

    class Spread(nn.Parameter):
        pass

    mlp.up_proj.weight = Spread(mlp.up_proj.weight.detach())


def _with_forward(attention: Any, mlp: Any) -> None:
    forward = mlp.forward
    mlp.forward = lambda x: 2 * forward(x)


def _with_other_activation(attention: Any, mlp: Any) -> None:
    mlp.act_fn = nn.ReLU()


def _with_another_part(attention: Any, mlp: Any) -> None:
    mlp.dropout = nn.Identity()


@pytest.mark.parametrize(
    ("change", "kept", "reason"),
    [
        (_with_hook, ROPE, "Linear has hooks"),
        (_with_adapter, ROPE, "k_proj is no plain linear (Adapted of Parameter)"),
        (_spread, GATE, "up_proj is no plain linear (Linear of Spread)"),
        (_with_forward, GATE, "the forward of LlamaMLP was replaced"),
        (_with_other_activation, GATE, "activation ReLU"),
        (_with_another_part, GATE, "LlamaMLP has other parts than a gated MLP"),
    ],
)
def test_what_is_more_than_it_looks_like_is_left_alone(change: Any, kept: str, reason: str) -> None:
    model = tiny("llama")
    layer = model.model.layers[1]
    change(layer.self_attn, layer.mlp)
    swapped = adapt(model)
    assert f"not fused: {kept}: {reason} (x 1)" in swapped.notes
    assert fused(swapped)[kept] == 1
    assert torch.equal(logits(swapped), logits(adapt(model, fuse=False)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_formulas_that_differ_a_little_are_told_apart(dtype: torch.dtype) -> None:
    """A factor of 0.99 on what a layer adds; a norm that subtracts the mean first."""
    granite = tiny("granite", residual_multiplier=0.99).to(dtype)
    assert "GraniteDecoderLayer adds and norms in an order of its own (x 2)" in reasons(granite)
    cohere = tiny("cohere2").to(dtype)
    assert "Cohere2LayerNorm is another norm than an RMS norm (x 3)" in reasons(cohere)


def test_hooks_of_transformers_for_hidden_states_keep_nothing_from_being_fused() -> None:
    """They are installed for good by the first forward that asks for hidden states."""
    model = tiny("llama")
    model(torch.tensor([[1, 2]]), output_hidden_states=True)
    assert fused(adapt(model)) == FUSED["llama"]


def test_what_happens_between_two_layers_counts() -> None:
    """The norm that a layer hands on is that of its own result, and taken for nothing else."""
    results = []
    for fuse in (False, True):
        adapted = adapt(tiny("llama"), fuse=fuse)
        layer = adapted.module.model.layers[0]
        layer.register_forward_hook(lambda module, args, output: output.flip(-1))
        results.append(logits(adapted))
    assert torch.equal(*results)


def test_a_drafter_is_fused_as_its_target_is() -> None:
    whole = "fused: gate * up 2, rotation + KV write 2, norm 5, residual + norm 2, joined linears 4"
    for fuse in (True, False):
        draft = graphattn.DraftModel(tiny("llama", seed=1), 2)
        options: dict[str, Any] = {"max_seq_len": 32, "max_tokens": 16, "backend": "eager"}
        with graphattn.capture(tiny("llama"), 2, speculate=draft, fuse=fuse, **options) as engine:
            notes = engine.report().notes
        assert (whole in notes, f"draft: {whole}" in notes) == (fuse, fuse)


def test_prediction_modules_are_fused_as_their_target_is() -> None:
    """One layer of latent attention and experts, whose last sum makes the norm after it."""
    for fuse in (True, False):
        model = tiny_latent("deepseek-v3", num_nextn_predict_layers=1)
        own = MtpModel(model, 1).eval()
        for parameter in own.layers.parameters():  # transformers leaves its experts unset
            nn.init.normal_(parameter, std=0.2)
        module: Any = adapt_mtp(own, adapt(model, fuse=fuse))
        counts = None if module.fusion is None else module.fusion.counts
        want = {GATE: 1, LATENT: 1, NORM: 5, ADD: 1, JOIN: 2}
        assert counts == (want if fuse else None)


def test_a_compiled_model_is_left_to_its_compiler() -> None:
    model = tiny("llama")
    model.compile(backend="eager")
    adapted = adapt(model)
    assert adapted.fusion is None
    assert all("fused" not in note for note in adapted.notes)
    torch._dynamo.reset()
