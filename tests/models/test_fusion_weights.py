"""Joined projections: what becomes of the owner's weights, and what is written into them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import graphattn
from graphattn import ConfigError, WeightsMovedError
from graphattn.models.transformers import adapt
from tests.models.families import tiny

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
WAYS = pytest.mark.parametrize(
    "options",
    [{"backend": "eager"}, {"backend": "host", "prepack": False}, {"backend": "host"}],
    ids=["eager", "host", "packed"],
)


def llama(seed: int = 0) -> Any:
    """q and gate large enough to be packed, k and v only together with q."""
    return tiny("llama", seed=seed, hidden_size=384, intermediate_size=384, num_attention_heads=24)


def capture(model: Any, **options: Any) -> graphattn.Engine:
    small: dict[str, Any] = {"max_seq_len": 32, "max_tokens": 16, "page_size": 4}
    return graphattn.capture(model, 2, **small | options)


def served(engine: graphattn.Engine) -> list[int]:
    (done,) = engine.generate([PROMPT], max_new_tokens=6)
    return list(done.token_ids)


def generated(model: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False
    )
    tokens: list[int] = output[0, len(PROMPT) :].tolist()
    return tokens


def attention(model: Any) -> Any:
    return model.model.layers[1].self_attn


@WAYS
def test_a_write_into_one_of_joined_weights_is_seen(options: dict[str, Any]) -> None:
    model = llama()
    with capture(model, **options) as engine:
        before = served(engine)
        assert before == generated(model)
        with torch.no_grad():
            attention(model).k_proj.weight.mul_(-3)
            attention(model).v_proj.weight.neg_()
        assert served(engine) == generated(model) != before


@pytest.mark.parametrize("options", [{"backend": "eager"}, {"backend": "host"}])
def test_exchanged_weights_are_joined_anew_by_recapture(options: dict[str, Any]) -> None:
    model = llama()
    with capture(model, **options) as engine:
        before = served(engine)
        attention(model).v_proj.weight = nn.Parameter(-attention(model).v_proj.weight.detach())
        with pytest.raises(WeightsMovedError, match=r"layers\.1\.self_attn\.v_proj\.weight"):
            served(engine)
        engine.recapture()
        while engine.busy:
            engine.step()
            engine.poll()
        assert served(engine) == generated(model) != before
        with torch.no_grad():
            attention(model).v_proj.weight.neg_()
        assert served(engine) == before


def test_the_owner_has_the_same_parameters_afterwards(tmp_path: Path) -> None:
    model = llama()
    parameters, values = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    logits = model(torch.tensor([PROMPT])).logits
    with capture(model) as engine:
        tokens = served(engine)
    assert all("forward" not in vars(module) for module in model.modules())
    now = dict(model.named_parameters())
    assert now.keys() == parameters.keys()
    assert all(now[name] is parameters[name] for name in now)
    assert all(torch.equal(x, values[name]) for name, x in model.state_dict().items())
    assert torch.equal(model(torch.tensor([PROMPT])).logits, logits)
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(x, values[name]) for name, x in again.state_dict().items())
    assert generated(again) == tokens
    alone = copy.deepcopy(attention(model).q_proj.weight)
    assert alone.untyped_storage().nbytes() == alone.nbytes, "a copy takes no neighbour along"


def test_weights_move_once() -> None:
    """An engine that was captured unfused before must follow; engines after it need not."""
    model = llama()
    with capture(model, fuse=False, backend="eager") as plain:
        before = served(plain)
        with capture(model, backend="eager") as first:
            places = [x.data_ptr() for x in model.parameters()]
            with capture(model, backend="eager") as second:
                assert [x.data_ptr() for x in model.parameters()] == places
                assert served(first) == served(second) == before
        with pytest.raises(WeightsMovedError):
            served(plain)
        plain.recapture()
        assert [x.data_ptr() for x in model.parameters()] == places


def test_weights_that_others_hold_stay_where_they_are() -> None:
    model = llama()
    held = model.state_dict()
    places = [x.data_ptr() for x in model.parameters()]
    adapted = adapt(model)
    assert [x.data_ptr() for x in model.parameters()] == places
    (note,) = (note for note in adapted.notes if note.startswith("not fused"))
    assert note == (
        "not fused: joined linears: tensors beside the model hold their memory, which would stay "
        "behind (x 4)"
    )
    with capture(model) as engine:
        before = served(engine)
        held["model.layers.1.self_attn.v_proj.weight"].neg_()
        assert served(engine) == generated(model) != before


def test_packing_joins_no_weight_twice() -> None:
    """The packed copies of a fused model are those of an unfused one, in as many products."""
    model = llama()
    kinds, sizes = [], []
    for fuse in (True, False):
        with capture(model, fuse=fuse, buckets=[2]) as engine:
            report = engine.report()
            kinds.append([bucket.kinds["packed"] for bucket in report.buckets])
            sizes.append(report.measured.weight_copies)
    assert kinds[0] == kinds[1]
    small = 2 * 2 * 2 * 16 * 384 * 4  # k and v are too small to be packed without q
    assert sizes[0] == sizes[1] + small


def test_the_option_is_checked() -> None:
    with pytest.raises(ConfigError, match="fuse: wanted True or False, got 'yes'"):
        capture(llama(), fuse="yes")
