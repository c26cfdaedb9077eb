"""Calls of torch.cuda that never reach the dispatcher, while a program is audited.

Without a driver most of them fail; a program that makes them goes on with stand-ins, and what a
captured stream forbids is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from .rules import ALLOCATOR, OTHER_STREAM, RANDOM_STATE, WAIT, Rule

Report = Callable[[str, Rule], None]


class _Stream:
    """Stands for a stream or an event: everything that is done with it is reported."""

    def __init__(self, report: Report, name: str) -> None:
        self._report, self._name = report, name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        rule = WAIT if attribute in ("synchronize", "query", "elapsed_time") else OTHER_STREAM

        def call(*args: Any, **kwargs: Any) -> _Stream:
            self._report(f"{self._name}.{attribute}", rule)
            return self

        return call

    def __enter__(self) -> _Stream:
        self._report(self._name, OTHER_STREAM)
        return self

    def __exit__(self, *error: object) -> None:
        pass


def _reports(report: Report, name: str, rule: Rule, result: Any = None) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        report(name, rule)
        return result

    return call


@contextmanager
def stand_ins(report: Report) -> Iterator[None]:
    """Within: `torch.cuda` answers without a driver and reports what a capture forbids."""

    def stream(name: str) -> Callable[..., _Stream]:
        return lambda *args, **kwargs: _Stream(report, name)

    calls: dict[str, Any] = {
        "cuda.Stream": stream("torch.cuda.Stream"),
        "cuda.Event": stream("torch.cuda.Event"),
        "cuda.stream": stream("torch.cuda.stream"),
        "cuda.default_stream": stream("torch.cuda.default_stream"),
        "cuda.current_stream": stream("torch.cuda.current_stream"),
        "cuda.is_current_stream_capturing": lambda: True,
    }
    calls |= {
        name: _reports(report, f"torch.{name}", rule)
        for rule, names in {
            WAIT: ("cuda.synchronize",),
            ALLOCATOR: ("cuda.empty_cache", "cuda.ipc_collect"),
            RANDOM_STATE: (
                "manual_seed",
                "seed",
                "set_rng_state",
                "cuda.manual_seed",
                "cuda.manual_seed_all",
                "cuda.seed",
                "cuda.set_rng_state",
                "cuda.get_rng_state",
            ),
        }.items()
        for name in names
    }
    with ExitStack() as stack:
        for name, call in calls.items():
            owner, _, attribute = name.rpartition(".")
            stack.enter_context(patch.object(torch.cuda if owner else torch, attribute, call))
        record = _reports(report, "torch.Tensor.record_stream", OTHER_STREAM)
        stack.enter_context(patch.object(torch.Tensor, "record_stream", record))
        stack.enter_context(a_device())
        yield


@contextmanager
def a_device(capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """Within: `torch.cuda` names one device of this compute capability, driver or none."""
    with (
        patch.object(torch.cuda, "current_device", lambda: 0),
        patch.object(torch.cuda, "get_device_capability", lambda *args: capability),
    ):
        yield
