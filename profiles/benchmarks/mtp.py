"""The miniature's own prediction module, one sequence at a time, beside `generate(use_mtp=True)`.

transformers drafts one token with it, at batch 1 and greedily; so do we here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

import graphattn
from profiles.miniature.model import load
from profiles.miniature.text import held_out_prompts
from profiles.record import Record, spread
from profiles.roofline import sizes, step_work
from profiles.setting import Refused, Setting


def measure(setting: Setting) -> Iterator[Record]:
    """Seconds of whole calls, in turn, over held-out texts."""
    new_tokens, prompts = setting.size(64, 8), held_out_prompts(setting.size(10, 3), 48)
    ours, theirs = setting.miniature, load()  # in this order: the first makes transformers quiet
    ours_s, theirs_s, steps = [], [], []
    with graphattn.capture(
        ours, 1, max_seq_len=128, max_tokens=64, speculate=graphattn.MTP(1)
    ) as engine:
        for prompt in prompts:
            before, started = engine.stats().steps, time.perf_counter()
            (done,) = engine.generate([prompt], max_new_tokens=new_tokens, ignore_eos=True)
            ours_s.append(time.perf_counter() - started)
            steps.append(ours_s[-1] / (engine.stats().steps - before))
            said, seconds = _generate(theirs, prompt, new_tokens)
            theirs_s.append(seconds)
            if said != done.token_ids:
                raise Refused(f"mtp: tokens differ: {done.token_ids} and {said}")
    stages = step_work(sizes(ours), [48 + new_tokens // 2], query_len=2)
    first = 1  # the first calls warm up
    yield {
        "batch": 1,
        "k": 1,
        "new_tokens": new_tokens,
        "against": "generate(use_mtp=True)",
        "call_s": spread(ours_s[first:]),
        "theirs_call_s": spread(theirs_s[first:]),
        "ratio": statistics.median(
            b / a for a, b in zip(ours_s[first:], theirs_s[first:], strict=True)
        ),
    } | setting.timed(steps[first:], stages)


def _generate(model: Any, prompt: list[int], new_tokens: int) -> tuple[tuple[int, ...], float]:
    ids, started = torch.tensor([prompt]), time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        use_mtp=True,
    )
    return tuple(out[0, len(prompt) :].tolist()), time.perf_counter() - started
