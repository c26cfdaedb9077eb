"""FP8 KV: what it costs in accuracy, and what it saves in memory.

For SmolLM2 (KV heads) and the miniature (latents), beside the fp32 model, for each way to hold the
KV: bf16, and FP8 without scales, with one scale per tensor, and with one per head.

    attention     relative RMS error of a layer's output for the model's own q, k, v: median and
                  largest over the layers
    kl, logprob   teacher-forced on a text, over its positions: mean KL divergence from the fp32
                  model in nats, mean absolute difference of the log-probability of the next token
    argmax        share of positions whose most probable token is the fp32 model's
    greedy        share of greedily continued tokens that equal the fp32 model's at their place,
                  from the engine itself: after the first difference texts go their own ways
    bytes         of KV per token, and pages that the same memory holds, from the engine's report
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

import graphattn
from graphattn.errors import UnsupportedModelError
from graphattn.models import adapt
from graphattn.models.contract import AttentionLayer, LowRank, Rotation, StepModel, StepSlots
from graphattn.models.scaled import ScaledModel
from profiles.miniature.text import held_out_prompts
from profiles.record import Record
from profiles.setting import Refused, Setting

FP8 = torch.float8_e4m3fn
MEMORY = 1 << 24  # bytes of KV pages of both engines
TEXT = (
    "The sea covers most of the Earth's surface. Its water is salty because rivers carry minerals "
    "from the land into it, and because water evaporates while the salt stays behind. Waves are "
    "made by wind, tides by the pull of the moon and the sun. Near the coast, cold water rises "
    "from the deep and brings food to the surface, so that many fish live there. People have "
    "fished, traded and fought on the sea for thousands of years; today most goods travel by ship, "
    "in steel boxes that are lifted from the deck to a train or a lorry within minutes."
)
QUESTIONS = (
    "The capital of France is",
    "Write a short story about a fisherman.",
    "Explain why the sky is blue.",
    "List three uses of salt:",
)


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, a text that it is judged on, prompts that it continues, and prompts for scales."""

    name: str
    model: StepModel
    text: list[int]
    prompts: list[list[int]]
    samples: list[list[int]]
    new_tokens: int


def measure(setting: Setting) -> Iterator[Record]:
    """A record for each model and way to hold the KV."""
    new_tokens = setting.size(32, 4)
    text, *prompts = setting.encoded([TEXT, *QUESTIONS])
    yield from compare(
        Workload("smollm2", adapt(setting.smollm2, fuse=False), text, prompts, prompts, new_tokens)
    )
    text, *prompts = held_out_prompts(setting.size(9, 3), setting.size(256, 64))
    prompts = [prompt[:48] for prompt in prompts]
    half = len(prompts) // 2
    yield from compare(
        Workload(
            "miniature",
            adapt(setting.miniature, fuse=False),
            text,
            prompts[:half],
            prompts[half:],
            new_tokens,
        )
    )


def per_tensor(layers: Sequence[AttentionLayer]) -> tuple[AttentionLayer, ...]:
    """One scale for all heads of K, and one for V: the largest of those by head."""

    def largest(scale: Tensor | None) -> Tensor | None:
        return None if scale is None else scale.max().reshape(1)

    return tuple(replace(x, k_scale=largest(x.k_scale), v_scale=largest(x.v_scale)) for x in layers)


def without_scales(layers: Sequence[AttentionLayer]) -> tuple[AttentionLayer, ...]:
    """All scales 1."""
    return tuple(replace(x, k_scale=None, v_scale=None, latent_scale=None) for x in layers)


class DenseStep:
    """One sequence, attended densely in fp32 over what pages of a dtype would give back.

    Meets `contract.ModelStep`. `errors` has each layer's, against exact K and V.
    """

    def __init__(
        self, token_ids: list[int], layers: Sequence[AttentionLayer], kv_dtype: torch.dtype
    ) -> None:
        self.input_ids = torch.tensor(token_ids)
        self.positions = self.logits_token = torch.arange(len(token_ids))
        self.features: dict[str, Tensor] = {}
        self.errors: list[float] = []
        self._layers, self._kv_dtype = layers, kv_dtype

    @property
    def slots(self) -> StepSlots:
        """None: models of attention layers only."""
        raise UnsupportedModelError("a dense step has no slots")

    def layer(self, index: int) -> AbstractContextManager[None]:
        """Nobody profiles it."""
        return nullcontext()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `ModelStep`."""
        spec = self._layers[layer]
        held = self._held(k, _column(spec.k_scale)), self._held(v, _column(spec.v_scale))
        return self._attend(spec, q, (k, v), held)

    def attend_latent(self, layer: int, q: Tensor, latent: Tensor) -> Tensor:
        """See `ModelStep`."""
        spec = self._layers[layer]
        scale = spec.latent_scale
        if scale is not None:
            sizes = torch.tensor([spec.value_dim, spec.head_dim - spec.value_dim])
            scale = scale.repeat_interleave(sizes)
        exact, held = (x.unsqueeze(1) for x in (latent, self._held(latent, scale)))
        dv = spec.value_dim
        return self._attend(spec, q, (exact, exact[..., :dv]), (held, held[..., :dv]))

    def attend_rotated(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation
    ) -> Tensor:
        """None: models that run their own operations, `adapt(model, fuse=False)`."""
        raise UnsupportedModelError("a dense step has no fused operations")

    def write_latent(
        self, layer: int, latent: Tensor, rotation: Rotation, query: LowRank | None
    ) -> None:
        """None, likewise."""
        raise UnsupportedModelError("a dense step has no fused operations")

    def attend_written(self, layer: int, q: Tensor, up: Tensor) -> Tensor:
        """None, likewise."""
        raise UnsupportedModelError("a dense step has no fused operations")

    def _held(self, values: Tensor, scale: Tensor | None) -> Tensor:
        if self._kv_dtype != FP8:
            return values.to(self._kv_dtype).float()
        scale = torch.ones(()) if scale is None else scale
        largest = torch.finfo(FP8).max
        return (values / scale).clamp(-largest, largest).to(FP8).float() * scale

    def _attend(
        self,
        spec: AttentionLayer,
        q: Tensor,
        exact: tuple[Tensor, Tensor],
        held: tuple[Tensor, Tensor],
    ) -> Tensor:
        wanted, got = (_dense(spec, q, *entries) for entries in (exact, held))
        self.errors.append(float((got - wanted).norm() / wanted.norm()))
        return got


def _column(scale: Tensor | None) -> Tensor | None:
    return None if scale is None else scale.unsqueeze(-1)


def _dense(spec: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[T, heads, Dv], causal, without window, soft-cap and sinks, which these models lack."""
    assert not spec.window
    assert not spec.softcap
    assert spec.sinks is None
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=spec.scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out[0].transpose(0, 1)


@torch.no_grad()
def accuracy(
    work: Workload, layers: Sequence[AttentionLayer], kv_dtype: torch.dtype
) -> dict[str, float]:
    """Teacher-forced, against the fp32 model."""
    exact = DenseStep(work.text, layers, torch.float32)
    step = DenseStep(work.text, layers, kv_dtype)
    wanted, got = (work.model(s).float().log_softmax(-1) for s in (exact, step))
    following = torch.tensor(work.text[1:]).unsqueeze(-1)
    kl = (wanted.exp() * (wanted - got)).sum(-1)
    difference = got[:-1].gather(-1, following) - wanted[:-1].gather(-1, following)
    return {
        "attention_median": statistics.median(step.errors),
        "attention_max": max(step.errors),
        "kl_mean": float(kl.mean()),
        "logprob_mean": float(difference.abs().mean()),
        "argmax": float((wanted.argmax(-1) == got.argmax(-1)).float().mean()),
    }


def served(
    work: Workload, layers: Sequence[AttentionLayer], kv_dtype: torch.dtype
) -> tuple[list[int], graphattn.EngineReport]:
    """Greedy tokens of an engine, and its report."""
    with graphattn.capture(
        ScaledModel(work.model, tuple(layers)),
        max_batch=len(work.prompts),
        max_seq_len=max(map(len, work.prompts)) + work.new_tokens,
        max_tokens=64,
        page_size=16,
        memory_budget=MEMORY,
        backend="eager",
        kv_dtype=kv_dtype,
    ) as engine:
        done = engine.generate(work.prompts, max_new_tokens=work.new_tokens, ignore_eos=True)
        return [token for completion in done for token in completion.token_ids], engine.report()


def compare(work: Workload) -> Iterator[Record]:
    """A record for each way to hold the KV."""
    scaled = graphattn.calibrate_kv(work.model, work.samples).attention_layers
    ways: dict[str, tuple[Sequence[AttentionLayer], torch.dtype]] = {
        "bf16": (scaled, torch.bfloat16),
        "fp8, scale 1": (without_scales(scaled), FP8),
        "fp8, per tensor": (per_tensor(scaled), FP8),
        "fp8, per head": (scaled, FP8),
    }
    if all(layer.value_dim for layer in scaled):
        ways["fp8, two scales"] = ways.pop("fp8, per head")
        del ways["fp8, per tensor"]
    wanted, whole = served(work, scaled, torch.float32)
    for way, (layers, kv_dtype) in ways.items():
        record = {"workload": work.name, "kv": way} | accuracy(work, layers, kv_dtype)
        per_token = whole.kv_bytes_per_token * kv_dtype.itemsize // 4
        if kv_dtype == FP8:
            got, report = served(work, layers, kv_dtype)
            if report.kv_bytes_per_token != per_token:
                raise Refused(f"{work.name}: {report.kv_bytes_per_token} bytes, not {per_token}")
            record |= {
                "greedy": sum(a == b for a, b in zip(got, wanted, strict=True)) / len(wanted),
                "greedy_first": _first_difference(got, wanted, work.new_tokens),
            }
        yield record | {"bytes_per_token": per_token, "tokens_per_gib": 2**30 // per_token}


def _first_difference(got: Sequence[int], wanted: Sequence[int], new_tokens: int) -> float:
    """Mean number of tokens of a request that are equal before the first that is not."""
    equal = []
    for start in range(0, len(wanted), new_tokens):
        pairs = zip(got[start:][:new_tokens], wanted[start:][:new_tokens], strict=True)
        equal.append(next((i for i, (a, b) in enumerate(pairs) if a != b), new_tokens))
    return statistics.mean(equal)
