"""From what was asked to one prediction for each combination of tp, dcp and mtp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from graphattn.errors import wrong
from graphattn.planner.capacity import Capacity, Load, capacity
from graphattn.planner.gpu import GPU
from graphattn.planner.model import Model
from graphattn.planner.shard import Shard
from graphattn.planner.work import Step, Times, Work, step_times, step_work


@dataclass(frozen=True, slots=True)
class Prediction:
    """One deployment in a steady state: requests of all ages, never too few."""

    shard: Shard
    mtp: int
    groups: int  # of `tp` GPUs, each with its own requests
    capacity: Capacity
    step: Step
    experts_touched: float | None
    work: Work
    times: Times
    output_tokens_per_s: float  # of all groups


@dataclass(frozen=True, slots=True)
class Question:
    """What `graphattn plan` was asked."""

    model: Model
    gpu: GPU
    gpus: int
    tp: Sequence[int]
    dcp: Sequence[int]
    mtp: Sequence[int]
    load: Load
    acceptance: float


def predict(question: Question) -> list[Prediction]:
    """In the order in which they were asked; `ConfigError` if one is impossible or does not fit."""
    load, model = question.load, question.model
    if load.context + load.output > model.max_positions:
        raise wrong(
            "--context",
            f"at most {model.max_positions} tokens with --output, the model's maximum",
            f"{load.context} + {load.output}",
            "Lower one of them.",
        )
    combinations = list(product(question.tp, question.dcp, question.mtp))
    for tp, dcp, mtp in combinations:
        _check(question, tp, dcp, mtp)
    return [_predict(question, Shard(tp, dcp), mtp) for tp, dcp, mtp in combinations]


def _predict(question: Question, shard: Shard, mtp: int) -> Prediction:
    model, gpu, load = question.model, question.gpu, question.load
    room = capacity(model, gpu, shard, mtp, load)
    emitted = room.batch * sum(question.acceptance**i for i in range(mtp + 1))
    prompt = emitted / load.output * _prompt_tokens(load, room)
    step = Step(rows=room.batch, places=room.batch * (1 + mtp), prompt=prompt)
    work = step_work(model, shard, mtp, load, step)
    times = step_times(work, step.rows, gpu, quantized=model.quantized)
    groups = question.gpus // shard.tp
    return Prediction(
        shard=shard,
        mtp=mtp,
        groups=groups,
        capacity=room,
        step=step,
        experts_touched=model.experts.touched(step.tokens) if model.experts else None,
        work=work,
        times=times,
        output_tokens_per_s=groups * emitted / times.total,
    )


def _prompt_tokens(load: Load, room: Capacity) -> float:
    """Prefilled for each request that ends: its prompt, and what a preemption computes again.

    Where KV is the limit, requests enter as soon as their prompt fits. What is left then is
    anything from nothing to a prompt; until the next request ends and frees its pages, the running
    ones take anything from nothing to an output's tokens. The youngest is preempted when the second
    exceeds the first.
    """
    again = min(1.0, load.output / (2 * load.context)) if room.limited else 0.0
    return load.context + again * load.mean_len


def _check(question: Question, tp: int, dcp: int, mtp: int) -> None:
    model = question.model
    if question.gpus % tp:
        raise wrong("--tp", f"divisors of --gpus {question.gpus}", tp, "Groups are of equal size.")
    if tp % dcp:
        raise wrong("--dcp", f"divisors of --tp {tp}", dcp, "A KV cache is shared inside a group.")
    if model.attention.heads % tp:
        raise wrong("--tp", f"divisors of {model.attention.heads} query heads", tp, "Lower it.")
    kv_heads, groups = getattr(model.attention, "kv_heads", 1), tp // dcp
    if kv_heads % groups and groups % kv_heads:
        raise wrong("--dcp", f"{kv_heads} KV heads over tp / dcp = {groups}", dcp, "Change one.")
    if mtp and not model.draft_modules:
        raise wrong("--mtp", f"0: {model.name} has no MTP module", mtp, "Leave it out.")
