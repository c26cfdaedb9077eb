"""Requests and what is reported of them: plain host objects."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypedDict

from graphattn.bounds import Bounds
from graphattn.errors import RequestError, wrong


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends.

    `max_new_tokens`  tokens to emit at most; the request also ends at the engine's max_seq_len
    `stop_token_ids`  tokens that end it, besides the model's own end-of-sequence tokens
    `ignore_eos`      do not stop at the model's end-of-sequence tokens
    `temperature`     divides the logits; 0 chooses the most probable token
    `top_k`           sample among the k most probable tokens only; 0 = all
    `top_p`           sample among the most probable tokens that together reach this probability
    `repetition_penalty`  > 1 makes tokens of the prompt and the output less probable (divides
                      positive logits, multiplies negative ones)
    `presence_penalty`, `frequency_penalty`  subtracted from the logits of emitted tokens: once,
                      and for each time
    `seed`            of the request's own randomness, 0 to 2**64 - 1. A token depends on nothing
                      but its distribution, the seed and its position: not on batch, bucket,
                      drafts or neighbours. None draws one.
    """

    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        self._check_ints()
        self._check_floats()
        if isinstance(self.stop_token_ids, str) or not all(map(_is_int, self.stop_token_ids)):
            raise _bad("stop_token_ids", "token ids", self.stop_token_ids, "Encode stop words.")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    def _check_ints(self) -> None:
        if not _is_int(self.max_new_tokens) or self.max_new_tokens < 1:
            raise _bad(
                "max_new_tokens",
                "an integer >= 1",
                self.max_new_tokens,
                "Ask for one token or more.",
            )
        if not _is_int(self.top_k) or self.top_k < 0:
            raise _bad("top_k", "an integer >= 0", self.top_k, "0 keeps all tokens.")
        if self.seed is not None and not (_is_int(self.seed) and 0 <= self.seed < 1 << 64):
            raise _bad("seed", "an integer in 0..2**64-1 or None", self.seed, "Drop its high bits.")

    def _check_floats(self) -> None:
        for name, wanted, good, fix in (
            ("temperature", "a number >= 0", lambda x: x >= 0, "0 is greedy."),
            ("top_p", "a number in (0, 1]", lambda x: 0 < x <= 1, "1 keeps all tokens."),
            ("repetition_penalty", "a number > 0", lambda x: x > 0, "1 is none."),
            ("presence_penalty", "a finite number", lambda x: True, "0 is none."),
            ("frequency_penalty", "a finite number", lambda x: True, "0 is none."),
        ):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            # Not math.isfinite: it overflows for an integer beyond every float.
            if not number or not abs(value) <= sys.float_info.max or not good(value):
                raise _bad(name, wanted, value, fix)


class SamplingFields(TypedDict, total=False):
    """The fields of `SamplingParams` as keywords."""

    max_new_tokens: int
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # a stop token, which is the last of its tokens
    LENGTH = "length"  # max_new_tokens, or the engine's max_seq_len
    ERROR = "error"  # its logits held a NaN; `Event.error` says so
    CANCELLED = "cancelled"  # by the caller, or because the engine was closed


@dataclass(eq=False, slots=True)
class Request:
    """A submitted request; compare by identity.

    `token_ids` are the emitted tokens that have been read so far, `logprobs` the log-probability of
    each under the model's unmodified distribution. Of `drafted` draft tokens `accepted` were right.
    `preemptions`: how often it left its slot to wait for pages.
    """

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    stop_len: int  # total length at which it ends
    stop_tokens: tuple[int, ...]
    seed: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def known_len(self) -> int:
        """Tokens of the prompt and those that have been read."""
        return len(self.prompt) + len(self.token_ids)

    @property
    def known_tokens(self) -> tuple[int, ...]:
        """They."""
        return (*self.prompt, *self.token_ids)

    @property
    def finished(self) -> bool:
        """Whether it has ended; nothing is emitted afterwards."""
        return self.finish_reason is not None

    def __repr__(self) -> str:
        state = self.finish_reason.value if self.finish_reason else "running"
        return (
            f"Request({self.id}, prompt {len(self.prompt)}, emitted {len(self.token_ids)}, {state})"
        )


class Event(NamedTuple):
    """News of one request: tokens that have landed, and whether it ended with them."""

    request: Request
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    finished: bool = False
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    error: str | None = None


def merge_params(params: SamplingParams | None, fields: SamplingFields) -> SamplingParams:
    """A request's parameters from `SamplingParams` or its fields as keywords.

    Raises `ConfigError` for both, `TypeError` for a keyword that is no field.
    """
    if params is None:
        return SamplingParams(**fields)  # type: ignore[arg-type]
    if not isinstance(params, SamplingParams):
        raise wrong("params", "SamplingParams", params, "Pass graphattn.SamplingParams(...).")
    if fields:
        raise wrong(
            "params",
            "SamplingParams or keywords, not both",
            f"both params and {', '.join(fields)}",
            "Put the keywords into SamplingParams.",
        )
    return params


def completion(request: Request) -> Completion:
    """A finished request, frozen."""
    assert request.finish_reason is not None
    return Completion(
        request.prompt,
        tuple(request.token_ids),
        tuple(request.logprobs),
        request.finish_reason,
        request.error,
    )


def new_request(
    request_id: int,
    token_ids: Sequence[int],
    params: SamplingParams,
    bounds: Bounds,
    eos_token_ids: tuple[int, ...],
) -> Request:
    """Check a request against the bounds.

    Raises `RequestError` for an empty prompt, one that leaves no room for a token, a token id
    outside the vocabulary, or too many stop tokens. What passes fits: the pool holds at least one
    sequence of `max_seq_len`.
    """
    prompt = _checked_prompt(token_ids, bounds)
    eos = () if params.ignore_eos else eos_token_ids
    stop_tokens = tuple(dict.fromkeys((*eos, *params.stop_token_ids)))
    if len(stop_tokens) > bounds.max_stop_tokens:
        raise _bad(
            "stop_token_ids",
            f"at most {bounds.max_stop_tokens} stop tokens with the model's own {len(eos)}",
            len(stop_tokens),
            "Drop some.",
        )
    for token in stop_tokens:
        _check_token("stop_token_ids", token, bounds)
    stop_len = min(len(prompt) + params.max_new_tokens, bounds.max_seq_len)
    seed = random.getrandbits(64) if params.seed is None else int(params.seed)
    return Request(request_id, prompt, params, stop_len, stop_tokens, seed)


def _checked_prompt(token_ids: Sequence[int], bounds: Bounds) -> tuple[int, ...]:
    if isinstance(token_ids, str) or not hasattr(token_ids, "__len__"):
        raise _bad("token_ids", "a sequence of token ids", token_ids, "Encode the prompt first.")
    if hasattr(token_ids, "tolist"):  # numpy arrays and CPU tensors
        token_ids = token_ids.tolist()
    if not token_ids:
        raise _bad("token_ids", "at least one token", "an empty prompt", "Add a start token.")
    if len(token_ids) >= bounds.max_seq_len:
        raise _bad(
            "token_ids",
            f"fewer than max_seq_len = {bounds.max_seq_len} tokens, to leave room for one more",
            f"{len(token_ids)} tokens",
            "Shorten the prompt or capture with a larger max_seq_len.",
        )
    for token in token_ids:
        _check_token("token_ids", token, bounds)
    return tuple(map(int, token_ids))


def _check_token(name: str, token: object, bounds: Bounds) -> None:
    if not _is_int(token) or not 0 <= token < bounds.vocab_size:  # type: ignore[operator]
        raise _bad(
            name,
            f"integers in 0..{bounds.vocab_size - 1}",
            token,
            "Use the tokenizer of this model.",
        )


def _is_int(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _bad(argument: str, wanted: str, got: object, fix: str) -> RequestError:
    shown = repr(got)
    return RequestError(f"{argument}: wanted {wanted}, got {shown[:200]}. {fix}")
