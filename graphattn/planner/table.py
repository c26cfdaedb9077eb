"""Predictions as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from graphattn.planner.capacity import GIB
from graphattn.planner.constants import ACCEPTANCE, CONSTANTS
from graphattn.planner.prediction import Prediction, Question

COLUMNS = (
    ("tp", 3),
    ("dcp", 3),
    ("mtp", 3),
    ("weights GiB", 11),
    ("KV tokens", 10),
    ("batch", 5),
    ("read GB", 7),
    ("Top", 5),
    ("sent GB", 7),
    ("messages", 8),
    ("linear", 6),
    ("attn", 6),
    ("comm", 6),
    ("host", 6),
    ("step ms", 7),
    ("tokens/s", 8),
)


def as_text(question: Question, predictions: Sequence[Prediction]) -> str:
    """A table, what its columns are, and the constants."""
    model, load = question.model, question.load
    token_bytes = predictions[0].capacity.token_bytes
    lines = [
        f"{model.name} on {question.gpus} x {question.gpu.name}, {load.context} tokens in, "
        f"{load.output} out; KV {token_bytes} bytes a token on a GPU that holds it",
        "",
        "  ".join(name.rjust(width) for name, width in COLUMNS),
        *(_line(p) for p in predictions),
        "",
        "Weights lie on each GPU, KV tokens fit on a group. Of one step, on one GPU: read is",
        "weights and KV, Top operations; linear, attn, comm and host are its milliseconds.",
        "tokens/s are output tokens of all GPUs.",
        "",
        *(f"{c.name} = {c.value:g} {c.unit}: {c.source}" for c in CONSTANTS),
    ]
    if question.acceptance != ACCEPTANCE.value:
        lines.append(f"acceptance was given: {question.acceptance:g}")
    return "\n".join(lines)


def as_json(question: Question, predictions: Sequence[Prediction]) -> str:
    """One object; `configurations` in the order of the table."""
    model, load = question.model, question.load
    return json.dumps(
        {
            "model": model.name,
            "gpu": asdict(question.gpu),
            "gpus": question.gpus,
            "context": load.context,
            "output": load.output,
            "acceptance": question.acceptance,
            "constants": [asdict(constant) for constant in CONSTANTS],
            "configurations": [_record(p) for p in predictions],
        },
        indent=2,
    )


def _line(p: Prediction) -> str:
    work, times = p.work, p.times
    operations = (
        work.linear_operations
        + work.expert_operations
        + work.other_operations
        + work.decode_operations
        + work.prompt_operations
    )
    values = (
        p.shard.tp,
        p.shard.dcp,
        p.mtp,
        f"{p.capacity.weight_bytes / GIB:.1f}",
        p.capacity.kv_tokens,
        p.capacity.batch,
        f"{(work.weight_bytes + work.kv_bytes) / 1e9:.1f}",
        f"{operations / 1e12:.1f}",
        f"{work.sent_bytes / 1e9:.1f}",
        f"{work.messages:.0f}",
        *(f"{s * 1e3:.1f}" for s in (times.linear, times.attention, times.messages, times.host)),
        f"{times.total * 1e3:.1f}",
        f"{p.output_tokens_per_s:.0f}",
    )
    return "  ".join(
        str(value).rjust(width) for value, (_, width) in zip(values, COLUMNS, strict=True)
    )


def _record(p: Prediction) -> dict[str, Any]:
    times = asdict(p.times)
    return {
        "tp": p.shard.tp,
        "dcp": p.shard.dcp,
        "mtp": p.mtp,
        "groups": p.groups,
        "weight_bytes": p.capacity.weight_bytes,
        "kv_bytes_per_token": p.capacity.token_bytes,
        "kv_tokens": p.capacity.kv_tokens,
        "batch": p.capacity.batch,
        "limited_by_kv": p.capacity.limited,
        "places": p.step.places,
        "prompt_tokens": p.step.prompt,
        "experts_touched": p.experts_touched,
        "step": asdict(p.work),
        "milliseconds": {name: seconds * 1e3 for name, seconds in times.items()},
        "step_ms": p.times.total * 1e3,
        "output_tokens_per_s": p.output_tokens_per_s,
    }
