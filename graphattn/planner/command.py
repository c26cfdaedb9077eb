"""`graphattn plan`: its options, and their way to a question."""

from __future__ import annotations

import argparse

from graphattn.errors import wrong
from graphattn.planner.capacity import Load
from graphattn.planner.config import SHIPPED
from graphattn.planner.constants import ACCEPTANCE
from graphattn.planner.gpu import EXAMPLE, GPUS, find_gpu
from graphattn.planner.model import read_model
from graphattn.planner.prediction import Question, predict
from graphattn.planner.table import as_json, as_text

KV_BYTES = {"bf16": 2, "fp8": 1}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("--model", required=True, help=f"a transformers folder, or {', '.join(sorted(SHIPPED))}")
    add("--gpu", required=True, help=f"{', '.join(GPUS)}, or figures: {EXAMPLE}")
    add("--gpus", type=int, default=1, metavar="N", help="of all groups")
    add("--tp", default="1", metavar="N,...", help="GPUs of a tensor-parallel group")
    add("--dcp", default="1", metavar="W,...", help="GPUs that share each KV cache")
    add("--mtp", default="0", metavar="K,...", help="draft tokens of each row")
    add("--context", type=int, required=True, metavar="N", help="prompt tokens of a request")
    add("--output", type=int, required=True, metavar="N", help="tokens that it emits")
    add("--max-batch", type=int, default=1024, metavar="N", help="sequences at once, a group")
    add("--kv-dtype", choices=KV_BYTES, default="bf16", help="of the KV pages")
    add("--acceptance", type=float, default=ACCEPTANCE.value, metavar="P", help="of each draft")
    add("--json", action="store_true", help="one JSON object on stdout")


def answer(arguments: argparse.Namespace) -> str:
    """What the command prints; raises `ConfigError`."""
    for name in ("gpus", "context", "output", "max_batch"):
        _positive(f"--{name.replace('_', '-')}", getattr(arguments, name))
    if not 0 <= arguments.acceptance <= 1:
        raise wrong("--acceptance", "a probability", arguments.acceptance, "Say 0.81.")
    question = Question(
        model=read_model(arguments.model),
        gpu=find_gpu(arguments.gpu),
        gpus=arguments.gpus,
        tp=_numbers("--tp", arguments.tp, at_least=1),
        dcp=_numbers("--dcp", arguments.dcp, at_least=1),
        mtp=_numbers("--mtp", arguments.mtp, at_least=0),
        load=Load(
            context=arguments.context,
            output=arguments.output,
            max_batch=arguments.max_batch,
            kv_bytes=KV_BYTES[arguments.kv_dtype],
        ),
        acceptance=arguments.acceptance,
    )
    show = as_json if arguments.json else as_text
    return show(question, predict(question))


def _numbers(option: str, text: str, *, at_least: int) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) >= at_least for part in parts):
        raise wrong(option, f"integers >= {at_least}, separated by commas", text, "Say 1,2,4.")
    return tuple(int(part) for part in parts)


def _positive(option: str, value: int) -> None:
    if value < 1:
        raise wrong(option, "an integer >= 1", value, "Say 1 or more.")
