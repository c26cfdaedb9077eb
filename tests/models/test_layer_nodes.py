"""Nodes of a layer in the graph of a decode step, counted on a fake CUDA device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphattn.kernels import attend_launch
from graphattn.kernels.attend import attend
from graphattn.kernels.attend_latent import attend_latent
from graphattn.layer_nodes import LAUNCHES, layer_nodes
from tests.kernels import attend_case, latent_case
from tests.models.families import tiny
from tests.models.latent_families import tiny_latent

needs_cuda_build = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="a CPU-only torch cannot fake a CUDA device"
)


@needs_cuda_build
@pytest.mark.parametrize(("family", "unfused"), [("llama", 36), ("qwen3", 48)])
def test_at_most_twelve_a_layer(family: str, unfused: int) -> None:
    """The first layer has the first norm on top; later ones get theirs from the layer before."""
    layers = layer_nodes(tiny(family))
    assert [(x.layer, x.nodes, x.unfused, x.experts) for x in layers] == [
        (0, 11, unfused, 0),
        (1, 10, unfused, 0),
    ]
    assert layers[1].operations == {
        "aten.mm": 4,
        "graphattn.rope_write": 1,
        "graphattn.attend": 2,
        "graphattn.add_rms_norm": 2,
        "graphattn.gated_mul": 1,
    }


@needs_cuda_build
def test_experts_are_counted_apart() -> None:
    """A dense layer has the three nodes of its MLP where others have experts."""
    dense, first, second = layer_nodes(tiny_latent("deepseek-v3"))
    assert [x.nodes for x in (dense, first, second)] == [13, 9, 9]
    assert [x.unfused for x in (dense, first, second)] == [58, 53, 53]
    assert dense.experts == 0
    assert first.experts == second.experts > 0
    assert "aten.topk" not in first.operations


def test_attention_launches_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    launch = attend_launch._launch

    def counted(kernel: Any, *args: Any) -> None:
        launched.append(kernel)
        launch(kernel, *args)

    monkeypatch.setattr(attend_launch, "_launch", counted)
    setting = attend_case.Setting(decode_query_len=3)
    for prefill in (False, True):
        rows = [attend_case.Row(4, 3, prefill=prefill)]
        plain = attend_case.build(rows, setting).args
        latent = latent_case.build(rows, latent_case.Latent(setting=setting)).args
        for op, args in ((attend, plain), (attend_latent, latent)):
            launched.clear()
            pure = {} if prefill else {"prefill_items": None, "prefill_count": None}
            op(*(args | pure).values())
            assert len(launched) == LAUNCHES[f"graphattn.{op.__name__}"] + prefill
