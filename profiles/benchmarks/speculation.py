"""Drafts beside plain decoding: speed, steps saved, cost of a step, acceptance by place.

SmolLM2 goes on with a text that repeats itself, and copies one that does not, with prompt lookup;
the miniature continues text that it has not seen, greedily and sampled, with its own prediction
module, up to four places ahead.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import graphattn
from graphattn.engine import Engine
from profiles.miniature.text import held_out_prompts
from profiles.record import Record
from profiles.roofline import sizes, step_work
from profiles.setting import Refused, Setting

REPEATS = " ".join(["The quick brown fox jumps over the lazy dog."] * 6)
COPIES = (
    "Copy this text word for word:\nAlice was beginning to get very tired of sitting by her "
    "sister on the bank, and of having nothing to do: once or twice she had peeped into the book "
    "her sister was reading, but it had no pictures or conversations in it."
)


@dataclass(frozen=True, slots=True)
class Text:
    """A model, what it continues, and who drafts for it, k places ahead."""

    name: str
    model: Any
    prompts: list[list[int]]
    drafter: type[graphattn.NGram] | type[graphattn.MTP]
    ks: tuple[int, ...]
    rounds: int  # of plain and drafting runs in turn
    temperature: float = 0.0


@dataclass(slots=True)
class Timed:
    """All prompts at once: their tokens, seconds in all, and seconds of each step that decodes."""

    token_ids: tuple[tuple[int, ...], ...]
    seconds: float
    steps: list[float] = field(default_factory=list)


def texts(setting: Setting) -> Iterator[Text]:
    """Those of a run."""
    smollm2, lookup, rounds = setting.smollm2, graphattn.NGram, setting.size(2, 1)
    yield Text("repeats", smollm2, setting.encoded([REPEATS]), lookup, (5,), rounds)
    yield Text("copies", smollm2, setting.encoded([COPIES]), lookup, (5,), rounds)
    held_out, ks = held_out_prompts(8, 48), setting.size((1, 2, 3, 4), (1,))
    for name, temperature in (("held-out", 0.0), ("held-out, sampled", 0.7)):
        yield Text(name, setting.miniature, held_out, graphattn.MTP, ks, rounds, temperature)


def measure(setting: Setting) -> Iterator[Record]:
    """A record per text and k."""
    for text in texts(setting):
        yield from _measure(setting, text)


def _measure(setting: Setting, text: Text) -> Iterator[Record]:
    longest = max(map(len, text.prompts))
    new_tokens = setting.size(64, 8)
    options: dict[str, Any] = {
        "max_batch": len(text.prompts),
        "max_seq_len": longest + new_tokens,
        "max_tokens": 64,
        "prefix_reuse": False,
    }
    lengths = [len(prompt) + new_tokens // 2 for prompt in text.prompts]
    with graphattn.capture(text.model, **options) as plain:
        for k in text.ks:
            with graphattn.capture(text.model, speculate=text.drafter(k), **options) as drafting:
                run(plain, text, new_tokens)  # caches of both are warm
                run(drafting, text, new_tokens)
                pairs = [
                    (run(plain, text, new_tokens), run(drafting, text, new_tokens))
                    for _ in range(text.rounds)
                ]
                stats = drafting.stats()
            if any(a.token_ids != b.token_ids for a, b in pairs):
                raise Refused(f"{text.name}: {text.drafter.__name__}({k}) changed a token")
            tokens = new_tokens * len(text.prompts)
            (a, b), stages = pairs[0], step_work(sizes(text.model), lengths, query_len=1 + k)
            yield {
                "text": text.name,
                "drafter": text.drafter.__name__,
                "k": k,
                "batch": len(text.prompts),
                "temperature": text.temperature,
                "ratio": statistics.median(a.seconds / b.seconds for a, b in pairs),
                "tokens_per_s": statistics.median(tokens / b.seconds for _, b in pairs),
                "plain_tokens_per_s": statistics.median(tokens / a.seconds for a, _ in pairs),
                "steps_saved": len(a.steps) / len(b.steps),
                "step_cost": statistics.median(
                    statistics.median(b.steps) / statistics.median(a.steps) for a, b in pairs
                ),
                "accepted_by_place": stats.accepted_by_place,
                "drafted_by_place": stats.drafted_by_place,
            } | setting.timed([s for _, b in pairs for s in b.steps], stages)


def run(engine: Engine, text: Text, new_tokens: int) -> Timed:
    """Generate to the fixed length. A step counts once all prompts are read."""
    started = last = time.perf_counter()
    requests = [
        engine.submit(
            prompt,
            max_new_tokens=new_tokens,
            temperature=text.temperature,
            seed=i,
            ignore_eos=True,
        )
        for i, prompt in enumerate(text.prompts)
    ]
    steps = []
    while engine.busy:
        decodes = all(request.token_ids for request in requests)
        engine.step()
        engine.poll()
        now = time.perf_counter()
        if decodes:
            steps.append(now - last)
        last = now
    tokens = tuple(tuple(request.token_ids) for request in requests)
    return Timed(tokens, last - started, steps)
