"""The adapter alone: what it learns of each layer, and logits of a step against the model's own.

The step attends densely to one sequence, with the options that the adapter found.
"""

from __future__ import annotations

import math

import pytest
import torch

from graphattn.errors import UnsupportedModelError
from graphattn.models.transformers import adapt
from tests.models.dense_step import DenseStep
from tests.models.families import FAMILIES, VOCAB, WINDOW, tiny


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_equal_the_models_own(family: str) -> None:
    model = tiny(family)
    adapted = adapt(model)
    token_ids = torch.randint(VOCAB, (23,))
    step = DenseStep(token_ids, adapted.attention_layers)
    logits = adapted(step)
    want = model(input_ids=token_ids.unsqueeze(0), use_cache=False).logits[0]
    # Sums of hidden_size terms in each of a dozen operations a layer, in another order.
    terms = 12 * model.config.hidden_size * model.config.num_hidden_layers
    budget = math.sqrt(terms) * 4 * torch.finfo(torch.float32).eps * want.abs().max()
    assert step.called == list(range(model.config.num_hidden_layers))
    assert (logits - want).abs().max() <= budget
    assert want.argmax(-1).unique().numel() > 5, "a model that always says the same shows nothing"


def test_geometry_and_options() -> None:
    gemma2 = adapt(tiny("gemma2"))
    assert [x.window for x in gemma2.attention_layers] == [WINDOW, 0]
    assert {x.softcap for x in gemma2.attention_layers} == {3.0}
    assert {x.scale for x in gemma2.attention_layers} == {24**-0.5}
    assert [x.window for x in adapt(tiny("gemma3")).attention_layers] == [WINDOW, 0, WINDOW]
    model = tiny("gpt-oss")
    for layer, spec in enumerate(adapt(model).attention_layers):
        assert spec.sinks is not None
        assert torch.equal(spec.sinks, model.model.layers[layer].self_attn.sinks)
        assert (spec.num_q_heads, spec.num_kv_heads, spec.head_dim) == (6, 2, 16)
        assert (spec.softcap, spec.window) == (0.0, 0 if layer else WINDOW)
    adapted = adapt(tiny("llama"))
    assert (adapted.vocab_size, adapted.max_seq_len) == (VOCAB, 96)
    assert (adapted.dtype, adapted.device) == (torch.float32, torch.device("cpu"))


def test_bfloat16_is_the_dtype_of_keys() -> None:
    adapted = adapt(tiny("gpt-oss").bfloat16())
    assert adapted.dtype == torch.bfloat16
    assert all(
        x.sinks is not None and x.sinks.dtype == torch.float32 for x in adapted.attention_layers
    )


@pytest.mark.parametrize(("eos", "want"), [(None, ()), (7, (7,)), ([7, 9], (7, 9))])
def test_end_tokens_are_those_of_generate(eos: object, want: tuple[int, ...]) -> None:
    model = tiny("llama")
    model.generation_config.eos_token_id = eos
    assert adapt(model).eos_token_ids == want


@torch.no_grad()
def test_owner_keeps_the_model() -> None:
    """Weights are shared, in both directions of time; settings are not."""
    model = tiny("qwen3")
    token_ids = torch.randint(VOCAB, (1, 9))
    settings, before = model.config.to_dict(), model(token_ids).logits
    implementation = model.config._attn_implementation
    adapted = adapt(model)
    step = DenseStep(token_ids[0], adapted.attention_layers)
    first = adapted(step)
    assert model.config._attn_implementation == implementation
    assert model.config.to_dict() == settings
    assert torch.equal(model(token_ids).logits, before)
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    second = dict(adapted.module.named_parameters()) | dict(adapted.module.named_buffers())
    assert own.keys() == second.keys()
    assert all(own[name] is second[name] for name in own)
    model.model.layers[0].mlp.down_proj.weight.mul_(2)
    assert not torch.equal(adapted(step), first)


@pytest.mark.parametrize("fuse", [False, True])
@torch.no_grad()
def test_changed_layer_is_refused(fuse: bool) -> None:
    adapted = adapt(tiny("llama"), fuse=fuse)
    adapted.module.model.layers[1].self_attn.scaling = 0.123
    step = DenseStep(torch.arange(4), adapted.attention_layers)
    with pytest.raises(UnsupportedModelError, match=r"layer 1 changed.*0\.123"):
        adapted(step)
