"""The decode step of SmolLM2 beside `generate` with a static cache and torch.compile, batch 8.

Compiling takes a minute or two, and a C++ compiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import CompileConfig, LogitsProcessorList

import graphattn
from graphattn.demo.runs import left_padded
from profiles.interleave import Tokens, Turns, finish, submit
from profiles.record import Record
from profiles.roofline import step_work
from profiles.setting import Setting
from profiles.workloads import DECODE_8, DRY


def measure(setting: Setting) -> Iterator[Record]:
    """One record. A dry run does not compile."""
    model, workload = setting.smollm2, setting.size(DECODE_8, DRY)
    with graphattn.capture(model, 8, max_seq_len=512) as engine:
        prompts = workload.prompts(engine.config.bounds.vocab_size)
        if not setting.dry:
            _generate(model, prompts, workload.new_tokens, compiled=True)
        requests, turns = submit(engine, workload), Turns(engine)
        theirs = _generate(model, prompts, workload.new_tokens, turns, compiled=not setting.dry)
        pairs = turns.pairs(finish(engine, requests), theirs)
    setting.check(pairs, "compiled")
    stages = step_work(setting.smollm2_sizes, workload.lengths)
    case = {"batch": workload.batch, "compiled": not setting.dry}
    yield case | setting.compared(pairs, "static cache", stages)


def _generate(
    model: Any,
    prompts: list[list[int]],
    new_tokens: int,
    turns: Turns | None = None,
    *,
    compiled: bool,
) -> Tokens:
    """Between two steps `generate` calls its logits processors: there we take our turn. (A hook on
    the model would be compiled with it.) After the last token nothing follows."""
    left = new_tokens

    def between(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        nonlocal left
        left -= 1
        if turns is not None:
            turns.take(decodes=left > 0)
        return scores

    config: Any = CompileConfig(mode="default")  # CUDA graphs need a GPU
    config._compile_all_devices = True  # else a CPU is left out
    input_ids, mask = left_padded(prompts, model.device)
    out = model.generate(
        input_ids=input_ids,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        cache_implementation="static",
        logits_processor=LogitsProcessorList([between]),
        **({"compile_config": config} if compiled else {"disable_compile": True}),
    )
    return tuple(tuple(row) for row in out[:, input_ids.shape[1] :].tolist())
