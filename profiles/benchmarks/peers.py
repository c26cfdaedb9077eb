"""Attention alone, a layer of SmolLM2 at batch 8, against length and bound, beside others.

Each implementation is checked first; one that is not there, not for this machine, or wrong is
listed with its reason.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch

from profiles.attention import decode_attention, gqa
from profiles.peaks import seconds
from profiles.peers import OURS, Call, candidates
from profiles.record import Record
from profiles.roofline import attention_work
from profiles.setting import Refused, Setting

LAYER, BATCH = gqa(9, 3, 64), 8
CASES = ((64, 64), (512, 512), (4096, 4096), (512, 4096))  # (tokens of each row, max_seq_len)


def measure(setting: Setting) -> Iterator[Record]:
    """A record per case and implementation; `ratio` is its time over ours in the same round."""
    names = setting.size(None, ("sdpa", "flashinfer"))  # compiling takes longer than a dry run may
    for length, bound in setting.size(CASES, ((16, 32),)):
        case = {"batch": BATCH, "length": length, "max_seq_len": bound}
        problem = decode_attention(
            LAYER, [length] * BATCH, max_seq_len=bound, dtype=torch.float32, device=setting.device
        )
        found = candidates(problem, names)
        if found[0].call is None:
            raise Refused(f"attention of {case}: ours {found[0].reason}")
        calls = {c.name: c.call for c in found if c.call is not None}
        work = {"attention": attention_work(LAYER, problem.lengths, 4, 4)}
        taken = rounds(setting, calls)
        for candidate in found:
            record = case | {"peer": candidate.name}
            if candidate.call is None:
                yield record | {"reason": candidate.reason}
                continue
            own = taken[candidate.name]
            ratio = statistics.median(a / b for a, b in zip(own, taken[OURS], strict=True))
            yield record | {"ratio": ratio} | setting.timed(own, work)


def rounds(setting: Setting, calls: dict[str, Call]) -> dict[str, list[float]]:
    """Seconds of each, one after the other in every round."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(setting.size(40, 3)):
        for name, call in calls.items():
            taken[name] += seconds(call, 1, setting.device)
    return taken
