"""What one step does on one GPU: bytes, operations, messages; and how long that takes."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from graphattn.bounds import max_local_length
from graphattn.planner.capacity import INTERLEAVE, Load
from graphattn.planner.constants import (
    BANDWIDTH,
    EXPERT_RATE,
    HOST_ROW,
    HOST_STEP,
    LINK,
    MATRIX_RATE,
    MESSAGE,
)
from graphattn.planner.gpu import GPU
from graphattn.planner.layers import Experts
from graphattn.planner.model import Model
from graphattn.planner.shard import Parameters, Shard

LSE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Step:
    """Tokens of an average step, over the group."""

    rows: float  # that decode
    places: float  # of those rows: 1 + drafts each
    prompt: float  # tokens of prompts

    @property
    def tokens(self) -> float:
        """All places."""
        return self.places + self.prompt


@dataclass(frozen=True, slots=True)
class Work:
    """On one GPU."""

    weight_bytes: float = 0  # read
    kv_bytes: float = 0  # read by decode rows
    linear_operations: float = 0  # of the matrices that a checkpoint may quantize, experts apart
    expert_operations: float = 0
    other_operations: float = 0  # of matrices that stay as they are: head, router, MTP entry
    decode_operations: float = 0  # of attention over the cache
    prompt_operations: float = 0  # of attention of prompts
    sent_bytes: float = 0
    messages: float = 0  # collectives

    def __add__(self, more: Work) -> Work:
        return Work(*(a + b for a, b in zip(astuple(self), astuple(more), strict=True)))

    def __mul__(self, times: float) -> Work:
        return Work(*(a * times for a in astuple(self)))


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one step, one after the other."""

    linear: float
    attention: float
    messages: float
    host: float

    @property
    def total(self) -> float:
        """The step."""
        return self.linear + self.attention + self.messages + self.host


def step_work(model: Model, shard: Shard, mtp: int, load: Load, step: Step) -> Work:
    """Of one step: the model, then its drafts."""
    work = _layer(model, shard, load, step, experts=False) * model.dense_layers
    if model.experts is not None:
        work += _layer(model, shard, load, step, experts=True) * model.expert_layers
    work += _head(model, shard, step.places)
    if mtp:  # the first pass runs over the step's places, the others over one token of each row
        work += _draft(model, shard, load, step)
        work += _draft(model, shard, load, Step(step.rows, step.rows, 0)) * (mtp - 1)
    return work


def step_times(work: Work, rows: float, gpu: GPU, *, quantized: bool) -> Times:
    """Weight reads and products are added, as is all else: the fit knows no overlap."""
    bandwidth = gpu.bandwidth * BANDWIDTH.value
    matrix = gpu.bf16 * MATRIX_RATE.value
    peak = gpu.fp8 if quantized else gpu.bf16
    return Times(
        linear=work.weight_bytes / bandwidth
        + work.linear_operations / (peak * MATRIX_RATE.value)
        + work.expert_operations / (peak * EXPERT_RATE.value)
        + work.other_operations / matrix,
        attention=max(work.kv_bytes / bandwidth, work.decode_operations / matrix)
        + work.prompt_operations / matrix,
        messages=work.sent_bytes / (gpu.link * LINK.value) + work.messages * MESSAGE.value,
        host=HOST_STEP.value + HOST_ROW.value * rows,
    )


def _layer(model: Model, shard: Shard, load: Load, step: Step, *, experts: bool) -> Work:
    attention = model.attention.parameters(shard) + model.norms
    if experts and model.experts is not None:
        block = _experts(model, model.experts, shard, step.tokens)
    else:
        block = _products(model, model.dense.parameters(shard), step.tokens)
    return (
        _products(model, attention, step.tokens)
        + _attention(model, shard, load, step)
        + block
        + _all_reduces(model, shard, step.tokens)
    )


def _products(model: Model, parameters: Parameters, tokens: float) -> Work:
    return Work(
        weight_bytes=model.weight_bytes(parameters),
        linear_operations=2 * parameters.linear * tokens,
        other_operations=2 * parameters.other * tokens,
    )


def _experts(model: Model, experts: Experts, shard: Shard, tokens: float) -> Work:
    active = experts.active(shard)
    return Work(
        weight_bytes=model.weight_bytes(experts.read(tokens, shard)),
        expert_operations=2 * active.linear * tokens,
        other_operations=2 * active.other * tokens,
    )


def _attention(model: Model, shard: Shard, load: Load, step: Step) -> Work:
    """Of decode rows over the cache, their query heads gathered over a DCP group; of prompts."""
    attention = model.attention
    keys = max_local_length(load.mean_len, shard.dcp, INTERLEAVE)
    heads = attention.heads * shard.dcp / shard.tp
    pair = 2 * heads * (attention.query_dim + attention.out_dim)
    prompt_pair = 2 * attention.heads / shard.tp * attention.prompt_dim
    work = Work(
        kv_bytes=step.rows * keys * attention.entry_values(shard) * load.kv_bytes,
        decode_operations=step.places * keys * pair,
        prompt_operations=step.prompt * load.context / 2 * prompt_pair,
    )
    if shard.dcp == 1:
        return work
    values = (attention.query_dim + attention.out_dim) * model.other_bytes / shard.dcp
    lse = LSE_BYTES * (shard.dcp - 1)
    sent = step.places * heads * (values * (shard.dcp - 1) + lse)
    return work + Work(sent_bytes=sent, messages=3)  # gather Q, gather LSE, reduce-scatter


def _all_reduces(model: Model, shard: Shard, tokens: float) -> Work:
    """One after attention, one after the feed-forward part."""
    if shard.tp == 1:
        return Work()
    ring = 2 * (shard.tp - 1) / shard.tp
    return Work(sent_bytes=2 * ring * tokens * model.hidden * model.other_bytes, messages=2)


def _head(model: Model, shard: Shard, places: float) -> Work:
    """Logits of `places`, gathered over the vocabulary."""
    work = _products(model, model.head(shard), places)
    if shard.tp == 1:
        return work
    sent = places * model.vocab * model.other_bytes * (shard.tp - 1) / shard.tp
    return work + Work(sent_bytes=sent, messages=1)


def _draft(model: Model, shard: Shard, load: Load, step: Step) -> Work:
    """One pass of an MTP module, its logits for one place of each row."""
    entry = _products(model, model.draft_entry, step.tokens)
    layer = _layer(model, shard, load, step, experts=model.experts is not None)
    return entry + layer + _head(model, shard, step.rows)
