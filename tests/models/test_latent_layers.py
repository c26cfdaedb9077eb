"""Latent attention through the adapter alone: what it learns, and logits of the model's own.

The step attends densely over the latents of one sequence; the model itself expands them to keys and
values of every head.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from graphattn.errors import UnsupportedModelError
from graphattn.models.transformers import adapt
from tests.models.dense_step import DenseStep
from tests.models.families import VOCAB, tiny
from tests.models.latent_families import LATENT_FAMILIES, tiny_latent


@pytest.mark.parametrize("family", LATENT_FAMILIES)
@torch.no_grad()
def test_logits_equal_the_models_own(family: str) -> None:
    model = tiny_latent(family)
    adapted = adapt(model)
    token_ids = torch.randint(VOCAB, (37,))
    step = DenseStep(token_ids, adapted.attention_layers)
    logits = adapted(step)
    want = model(input_ids=token_ids.unsqueeze(0), use_cache=False).logits[0]
    # Sums of hidden_size terms in each of two dozen operations a layer, in another order.
    terms = 24 * model.config.hidden_size * model.config.num_hidden_layers
    budget = math.sqrt(terms) * 4 * torch.finfo(torch.float32).eps * want.abs().max()
    assert step.called == list(range(model.config.num_hidden_layers))
    assert (logits - want).abs().max() <= budget
    assert want.argmax(-1).unique().numel() > 5, "a model that always says the same shows nothing"


def test_geometry_and_notes() -> None:
    adapted = adapt(tiny_latent("deepseek-v3"))
    for spec in adapted.attention_layers:
        assert (spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim) == (
            3,
            1,
            28,
            20,
        )
        assert (spec.window, spec.softcap, spec.sinks) == (0, 0.0, None)
        assert spec.scale == 18**-0.5
        assert spec.entry_values == 28
    assert adapted.notes[:2] == (
        "latent attention: 3 layers, 28 values per token and layer instead of 96",
        "experts: grouped_mm",
    )
    assert adapt(tiny("llama"), fuse=False).notes == ()


def test_yarn_scales_the_scores() -> None:
    """Its factor is part of the softmax scale, as the module has it."""
    (scale,) = {x.scale for x in adapt(tiny_latent("deepseek-v3-yarn")).attention_layers}
    assert scale == pytest.approx(18**-0.5 * (0.1 * 1.3 * math.log(4.0) + 1.0) ** 2)


@torch.no_grad()
def test_owner_keeps_the_model() -> None:
    """Our tree hands on latents and has experts of its own choice; weights are shared."""
    model = tiny_latent("deepseek-v3")
    model.set_experts_implementation("eager")
    token_ids = torch.randint(VOCAB, (1, 9))
    before = model(token_ids).logits
    adapted = adapt(model)
    step = DenseStep(token_ids[0], adapted.attention_layers)
    first = adapted(step)
    assert model.config._experts_implementation == "eager"
    assert adapted.module.config._experts_implementation == "grouped_mm"
    assert "expand_kv" not in vars(model.model.layers[0].self_attn)
    assert torch.equal(model(token_ids).logits, before)
    own, second = (dict(m.named_parameters()) for m in (model, adapted.module))
    assert own.keys() == second.keys()
    assert all(own[name] is second[name] for name in own)
    model.model.layers[0].self_attn.kv_b_proj.weight.mul_(2)
    assert not torch.equal(adapted(step), first), "W_UK and W_UV are read where they lie"


def test_the_owners_batched_experts_stay() -> None:
    model = tiny_latent("deepseek-v2")
    model.set_experts_implementation("batched_mm")
    adapted = adapt(model)
    assert adapted.module.config._experts_implementation == "batched_mm"
    assert adapted.notes[1] == "experts: batched_mm"


@pytest.mark.parametrize(
    ("capability", "dtype", "served"),
    [
        ((9, 0), torch.bfloat16, True),
        ((10, 0), torch.bfloat16, True),
        ((8, 0), torch.bfloat16, False),
        ((9, 0), torch.float32, False),
    ],
)
def test_grouped_experts_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    dtype: torch.dtype,
    served: bool,
) -> None:
    """Elsewhere its fallback reads the routing on the host."""
    model = tiny_latent("deepseek-v3").to(dtype)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if served:
        assert adapt(model).notes[1] == "experts: grouped_mm"
        return
    with pytest.raises(UnsupportedModelError, match=r"grouped_mm of .* reads the routing.*batched"):
        adapt(model)
    model.set_experts_implementation("batched_mm")
    assert adapt(model).notes[1] == "experts: batched_mm"


def _sparse() -> PreTrainedModel:
    return tiny_latent("deepseek-v32")


def _biased() -> PreTrainedModel:
    model = tiny_latent("deepseek-v3")
    model.model.layers[1].self_attn.kv_b_proj = nn.Linear(20, 72)
    return model


def _other_expansion() -> PreTrainedModel:
    model = tiny("llama")
    model.config.kv_lora_rank = 16
    return model


REFUSED: list[tuple[Callable[[], object], str]] = [
    (_sparse, "DeepseekV32Attention picks the positions to attend to"),
    (_biased, r"DeepseekV3Attention: kv_b_proj is no plain product of shape \(72, 20\)"),
    (_other_expansion, r"LlamaForCausalLM.*latent attention \(MLA\) that does not expand"),
]


@pytest.mark.parametrize(
    ("build", "message"), REFUSED, ids=[b.__name__.strip("_") for b, _ in REFUSED]
)
def test_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        adapt(build())
