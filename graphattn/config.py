"""Buckets and backends: what a capture was asked for, checked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from graphattn.bounds import Bounds
from graphattn.errors import wrong

Backend = Literal["cuda", "host", "eager"]

MAX_TOKENS_DEFAULT = {"cpu": 512, "cuda": 2048}
CPU_MEMORY_BUDGET = 2 << 30  # bytes of KV pages unless memory_budget or num_pages says otherwise
MIXED_STEP_RATIO = 4  # neighbouring mixed buckets differ by this factor


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """Static shape of one captured graph: `tokens` places; `mixed` ones can hold prefill rows."""

    tokens: int
    mixed: bool

    @property
    def name(self) -> str:
        """Name in reports, profiles and errors."""
        return f"{'mixed' if self.mixed else 'decode'}-{self.tokens}"


@dataclass(frozen=True, slots=True)
class BucketSet:
    """The buckets of an engine, each list ascending and covering every possible step."""

    decode: tuple[Bucket, ...]
    mixed: tuple[Bucket, ...]

    def __iter__(self):  # type: ignore[no-untyped-def]
        """Largest first: the order of capture."""
        return iter(sorted((*self.decode, *self.mixed), reverse=True))

    def smallest(self, tokens: int, *, mixed: bool) -> Bucket:
        """The bucket for a step of `tokens` places; there always is one."""
        return next(b for b in (self.mixed if mixed else self.decode) if b.tokens >= tokens)

    def check(self, bucket: Bucket, tokens: int) -> None:
        """Raise `ConfigError` unless `bucket` is one of them and has `tokens` places."""
        names = ", ".join(b.name for b in (*self.decode, *self.mixed))
        if bucket not in (*self.decode, *self.mixed):
            raise wrong("bucket", f"one of {names}", bucket, "Take it from engine.config.buckets.")
        if tokens > bucket.tokens:
            raise wrong(
                "bucket", f"at least {tokens} token places", bucket.name, "Every row must decode."
            )


def decode_buckets(bounds: Bounds) -> tuple[Bucket, ...]:
    """Powers of two of full decode rows, and exactly `max_batch` rows."""
    rows = {bounds.max_batch} | {
        1 << i for i in range(bounds.max_batch.bit_length()) if 1 << i < bounds.max_batch
    }
    return tuple(Bucket(r * bounds.decode_query_len, mixed=False) for r in sorted(rows))


def mixed_buckets(bounds: Bounds) -> tuple[Bucket, ...]:
    """`max_tokens`, and a few smaller ones for short prompts."""
    sizes = {bounds.max_tokens}
    size = bounds.max_tokens
    while size // MIXED_STEP_RATIO >= max(16, bounds.decode_query_len):
        size //= MIXED_STEP_RATIO
        sizes.add(size)
    return tuple(Bucket(n, mixed=True) for n in sorted(sizes))


def resolve_buckets(bounds: Bounds, sizes: Sequence[int] | None) -> BucketSet:
    """The default set, or the given decode batch sizes (rows) with the default mixed buckets.

    Raises `ConfigError` when the sizes are not ascending integers that end with `max_batch`:
    a decode step without a bucket would have no graph.
    """
    if sizes is None:
        return BucketSet(decode_buckets(bounds), mixed_buckets(bounds))
    rows = list(sizes)
    valid = all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in rows)
    if not rows or not valid or rows != sorted(set(rows)) or rows[-1] != bounds.max_batch:
        raise wrong(
            "buckets",
            f"ascending row counts that end with max_batch = {bounds.max_batch}",
            sizes,
            "Every decode batch needs a graph.",
        )
    decode = tuple(Bucket(n * bounds.decode_query_len, mixed=False) for n in rows)
    return BucketSet(decode, mixed_buckets(bounds))


def resolve_backend(backend: str, device: torch.device) -> Backend:
    """`auto` is `cuda` for a model on a CUDA device, else `host`."""
    if backend == "auto":
        return "cuda" if device.type == "cuda" else "host"
    if backend not in ("cuda", "host", "eager"):
        raise wrong("backend", "'auto', 'cuda', 'host' or 'eager'", backend, "Pass one of these.")
    wants = "cuda" if backend == "cuda" else "cpu"
    if backend != "eager" and device.type != wants:
        raise wrong(
            "backend",
            f"one that fits a model on {device}",
            backend,
            f"Move the model to {wants} or pass backend='auto'.",
        )
    return backend  # type: ignore[return-value]


def fit_seq_len(model_max: int, asked: int | None, tokens_that_fit: int) -> tuple[int, str | None]:
    """Longest sequence to plan for, and a note when it is shorter than the model's.

    Raises `ConfigError` when an explicit `max_seq_len` exceeds the model or the pages.
    """
    if asked is None:
        if tokens_that_fit >= model_max:
            return model_max, None
        return tokens_that_fit, (
            f"max_seq_len reduced from the model's {model_max} to {tokens_that_fit}, "
            "the longest that the KV pages hold"
        )
    if not isinstance(asked, int) or isinstance(asked, bool) or asked < 1:
        raise wrong("max_seq_len", "an integer >= 1", asked, "Leave it out for the model's own.")
    if asked > model_max:
        raise wrong(
            "max_seq_len", f"at most the model's {model_max}", asked, "Its positions end there."
        )
    if asked > tokens_that_fit:
        raise wrong(
            "max_seq_len",
            f"at most the {tokens_that_fit} tokens that the KV pages hold",
            asked,
            "Raise num_pages or memory_budget.",
        )
    return asked, None


def pages_in(budget: int, page_bytes: int) -> int:
    """Pages that a memory budget in bytes holds; `ConfigError` when not even one."""
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < page_bytes:
        raise wrong(
            "memory_budget",
            f"bytes for at least one page of KV ({page_bytes} bytes over all layers)",
            budget,
            "Raise memory_budget or lower page_size.",
        )
    return budget // page_bytes
