"""One greedy decode of a batch of prompts, by three runtimes, with a time stamp per step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from graphattn.request import SamplingParams

if TYPE_CHECKING:
    from graphattn.engine import Engine
    from graphattn.request import Request

Prompts = Sequence[Sequence[int]]

# Of the free memory, for the cache of `generate_batch`: its default takes most of it, and half a
# minute to touch it, which would be all that a comparison of whole calls shows.
CACHE_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Run:
    """What a runtime emitted, by prompt, and when.

    `stamps` [number of steps], seconds: when the tokens of each step had reached the host. The
    first step holds the prefill, so the differences are decode steps.
    """

    token_ids: tuple[tuple[int, ...], ...]
    seconds: float
    stamps: tuple[float, ...]

    @property
    def step_seconds(self) -> tuple[float, ...]:
        """Duration of each decode step."""
        return tuple(b - a for a, b in zip(self.stamps, self.stamps[1:], strict=False))

    @property
    def median_step(self) -> float:
        """Median decode step, seconds."""
        return statistics.median(self.step_seconds)

    @property
    def tokens_per_second(self) -> float:
        """Of the whole call: prefill, decode, and what the runtime does around them."""
        return sum(map(len, self.token_ids)) / self.seconds


def run_engine(
    engine: Engine,
    prompts: Prompts,
    params: SamplingParams | Sequence[SamplingParams],
    *,
    on_tokens: Callable[[int, Sequence[int], bool], None] = lambda index, token_ids, done: None,
) -> Run:
    """All prompts at once through `engine`, with parameters for all or for each.

    `on_tokens` gets each prompt's index and news.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    started = time.perf_counter()
    index: dict[Request, int] = {
        engine.submit(prompt, own): i
        for i, (prompt, own) in enumerate(zip(prompts, each, strict=True))
    }
    stamps = []
    while engine.busy:
        engine.step()
        events = engine.poll()
        if any(event.token_ids for event in events):
            stamps.append(time.perf_counter())
        for event in events:
            on_tokens(index[event.request], event.token_ids, event.finished)
    tokens = tuple(tuple(request.token_ids) for request in index)
    return Run(tokens, time.perf_counter() - started, tuple(stamps))


def run_generate(
    model: Any, prompts: Prompts, max_new_tokens: int, *, ignore_eos: bool = False
) -> Run:
    """transformers `generate`: one batch, padded on the left."""
    stamps: list[float] = []

    def stamp(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        stamps.append(time.perf_counter())
        return scores

    from transformers import LogitsProcessorList

    eos = model.generation_config.eos_token_id
    input_ids, mask = left_padded(prompts, model.device)
    started = time.perf_counter()
    out = model.generate(
        input_ids=input_ids,
        attention_mask=mask,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=None if ignore_eos else eos,
        pad_token_id=0,
        logits_processor=LogitsProcessorList([stamp]),
    )
    seconds = time.perf_counter() - started
    stops = () if ignore_eos else _ids(eos)
    rows = out[:, input_ids.shape[1] :].tolist()
    return Run(tuple(_until(row, stops) for row in rows), seconds, tuple(stamps))


def run_generate_batch(
    model: Any,
    prompts: Prompts,
    max_new_tokens: int,
    *,
    ignore_eos: bool = False,
) -> Run:
    """transformers `generate_batch`: continuous batching over a paged cache.

    A call sets up its cache and its thread first, which takes seconds; `stamps` leave that out. Its
    cache gets `CACHE_SHARE` of the free memory.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = GenerationConfig.from_model_config(model.config)
    config.max_new_tokens, config.do_sample = max_new_tokens, False
    if ignore_eos:
        config.eos_token_id = -1  # a token that no model emits
    started = time.perf_counter()
    outputs = model.generate_batch(
        [list(prompt) for prompt in prompts],
        generation_config=config,
        continuous_batching_config=ContinuousBatchingConfig(max_memory_percent=CACHE_SHARE),
        record_timestamps=True,
    )
    seconds = time.perf_counter() - started
    in_order = [outputs[key] for key in sorted(outputs, key=lambda key: int(key.split("_")[-1]))]
    longest = max(in_order, key=lambda output: len(output.generated_tokens))
    tokens = tuple(tuple(output.generated_tokens) for output in in_order)
    return Run(tokens, seconds, tuple(longest.timestamps))


def left_padded(prompts: Prompts, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask [prompts, longest prompt], padded on the left."""
    longest = max(map(len, prompts))
    pads = [longest - len(prompt) for prompt in prompts]
    ids = [[0] * pad + list(prompt) for pad, prompt in zip(pads, prompts, strict=True)]
    mask = [[0] * pad + [1] * len(prompt) for pad, prompt in zip(pads, prompts, strict=True)]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _until(row: list[int], stops: tuple[int, ...]) -> tuple[int, ...]:
    """`row` up to its first stop token, that one included."""
    ends = [row.index(stop) + 1 for stop in stops if stop in row]
    return tuple(row[: min(ends, default=len(row))])


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
