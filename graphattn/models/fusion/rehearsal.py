"""A caller that stands in for a step while a module is compared with what would replace it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from graphattn.errors import UnsupportedModelError
from graphattn.models.contract import LowRank, Rotation
from graphattn.models.fusion.matching import Inputs, agree, noise
from graphattn.models.transformers_calls import Call, Geometry

Scalars = Mapping[str, object]
Candidate = TypeVar("Candidate", bound=Callable[..., Any])


class Heads(NamedTuple):
    """What an attention is given; of a latent one k and v are the latents, whole and their c."""

    q: Tensor  # [T, num_q_heads, head_dim]
    k: Tensor  # [T, num_kv_heads, head_dim]
    v: Tensor  # [T, num_kv_heads, value_dim]

    def agree(self, other: Heads) -> bool:
        """Whether they differ by rounding only."""
        return all(map(agree, self, other))

    def distance(self, other: Heads) -> float:
        """Sum of differences; 0 on a fake device, which has no values."""
        if isinstance(self.q, FakeTensor):
            return 0.0
        return sum(float((a - b).abs().sum()) for a, b in zip(self, other, strict=True))


class Rehearsal:
    """Notes the one attention call of a module, and answers with noise. Meets `FusedCaller`."""

    def __init__(self) -> None:
        self.heads: Heads
        self._latents: Tensor
        self.geometry: Geometry
        self.sinks: Tensor | None = None

    def attend(self, call: Call) -> Tensor:
        """See `Caller`."""
        self.geometry, self.sinks = call.geometry, call.sinks
        self.heads = Heads(call.q, call.k, call.v)
        return self._answer(call.geometry.value_dim)

    def attend_rotated(
        self,
        layer_idx: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotation: Rotation,
        sinks: Tensor | None,
    ) -> Tensor:
        """See `FusedCaller`."""
        tokens, _, dim = q.shape
        q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        pools = torch.zeros(2, 1, k.shape[1], tokens, dim, dtype=q.dtype, device=q.device)
        place = torch.arange(tokens, device=q.device)
        rotation.write(q, k, v, place, q_out, pools[0], pools[1])
        self.heads = Heads(q_out, *(pool[0].transpose(0, 1) for pool in pools))
        return self._answer(dim)

    def write_latent(
        self, layer_idx: int, latent: Tensor, rotation: Rotation, query: LowRank | None
    ) -> None:
        """See `FusedCaller`."""
        pool = torch.zeros(1, *latent.shape, dtype=latent.dtype, device=latent.device)
        place = torch.arange(len(latent), device=latent.device)
        rotation.write_latent(latent, place, pool, None, query)
        self._latents = pool[0].unsqueeze(1)

    def attend_written(self, layer_idx: int, q: Tensor, up: Tensor) -> Tensor:
        """See `FusedCaller`."""
        value_dim = up.shape[2]
        self.heads = Heads(q, self._latents, self._latents[..., :value_dim])
        averages = self._answer(value_dim).transpose(0, 1)
        return torch.bmm(averages, up.transpose(1, 2)).transpose(0, 1)

    def _answer(self, value_dim: int) -> Tensor:
        tokens, heads, _ = self.heads.q.shape
        return noise(self.heads.q, tokens, heads, value_dim, seed=1)


def nearest(
    candidates: Iterable[Candidate], inputs: Inputs, want: Tensor, heads: Heads
) -> Candidate | None:
    """The one that gives the same result from the same heads; of several, that with the nearest.

    In 16 bits some differ by how often they round.
    """
    best, smallest = None, float("inf")
    for candidate in candidates:
        ours = Rehearsal()
        try:
            got = inputs.call(candidate, graphattn_caller=ours)[0]
        except (TypeError, ValueError, IndexError, RuntimeError):
            continue  # the position embeddings are of another kind
        if not (agree(got, want) and ours.heads.agree(heads)):
            continue
        distance = ours.heads.distance(heads)
        if distance < smallest:
            best, smallest = candidate, distance
        if distance == 0.0:
            break
    return best


def scalars(module: nn.Module) -> Scalars:
    """What a module keeps beside tensors and modules: scale, window, soft-cap and the like."""
    kinds = (bool, int, float, str, type(None))
    kept = {name: x for name, x in vars(module).items() if isinstance(x, kinds)}
    kept.pop("training", None)
    return kept


def check_unchanged(module: nn.Module, before: Scalars) -> None:
    """Raise `UnsupportedModelError` when scalars of a fused attention are not what they were."""
    now = vars(module)
    changed = [
        f"{name} was {x}, is {now.get(name)}" for name, x in before.items() if now.get(name) != x
    ]
    if changed:
        raise UnsupportedModelError(
            f"layer {module.layer_idx} changed its attention since it was captured: "
            f"{', '.join(changed)}"
        )
