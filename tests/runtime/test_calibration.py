"""calibrate_kv: scales from what prompts leave in the pages."""

from __future__ import annotations

import pytest
import torch

import graphattn
from graphattn import ConfigError
from tests.runtime.serving import make_engine, prompts
from tests.runtime.tiny_latent import TinyLatent
from tests.runtime.tiny_model import TinyModel

FP8 = torch.float8_e4m3fn
TEXTS = prompts(3, seed=2, longest=20)


def peaks(model: TinyModel, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of K and V by head over all prompts, of a first layer: its inputs need no attention."""
    assert layer == 0
    ids = [torch.tensor(text) for text in TEXTS]
    inputs = torch.cat([model.embed(x) + model.position.weight[: len(x)] for x in ids])
    _, k, v = model._split(layer, inputs)
    return k.abs().amax((0, 2)), v.abs().amax((0, 2))


def test_the_peaks_of_every_head_lie_below_the_largest_value() -> None:
    model = TinyModel()
    before = model.attention_layers
    scaled = graphattn.calibrate_kv(model, TEXTS, headroom=4.0)
    first = scaled.attention_layers[0]
    for scale, peak in zip((first.k_scale, first.v_scale), peaks(model, 0), strict=True):
        assert scale is not None
        torch.testing.assert_close(scale, peak * (4.0 / 448))
    assert model.attention_layers is before
    assert all(x.k_scale is None for x in before)


def test_latents_have_two_scales() -> None:
    model = TinyLatent(latent=(0,), windows=(0, 5))
    latent, other = graphattn.calibrate_kv(model, TEXTS).attention_layers
    ids = [torch.tensor(text) for text in TEXTS]
    inputs = torch.cat([model.embed(x) + model.position.weight[: len(x)] for x in ids])
    entries = model.queries(0, inputs)[1].abs()
    dv = latent.value_dim
    wanted = torch.stack([entries[:, :dv].max(), entries[:, dv:].max()]) * (2 / 448)
    assert latent.latent_scale is not None
    torch.testing.assert_close(latent.latent_scale, wanted)
    assert other.latent_scale is None
    assert other.k_scale is not None


def test_a_calibrated_model_serves_and_keeps_its_weights() -> None:
    """Values far below the format's range come back; an engine still sees writes to the weights."""
    model = TinyModel()
    for projection in model.qkv:
        projection.weight[48:].mul_(1e-4)  # K and V
        projection.bias[48:].mul_(1e-4)
    for out in model.out:
        out.weight.mul_(1e4)
    exact = [model.generate(text, 6) for text in TEXTS]

    def same(served: object) -> int:
        with make_engine(served, kv_dtype=FP8) as engine:
            assert engine._runner.weights.parameters.keys() == dict(model.named_parameters()).keys()
            done = engine.generate(TEXTS, max_new_tokens=6)
        pairs = zip(done, exact, strict=True)
        return sum(a == b for x, y in pairs for a, b in zip(x.token_ids, y, strict=True))

    assert same(graphattn.calibrate_kv(model, TEXTS)) >= 12 > same(model)


@pytest.mark.parametrize(
    ("prompts", "options", "name"),
    [([], {}, "prompts"), ([[1], []], {}, "prompts"), ([[1]], {"headroom": 0.5}, "headroom")],
)
def test_a_wrong_argument_is_named(
    prompts: list[list[int]], options: dict[str, float], name: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: "):
        graphattn.calibrate_kv(TinyModel(), prompts, **options)
