"""Errors a caller can meet.

    GraphAttnError
    ├── ConfigError (also ValueError)      a wrong argument; nothing was changed
    ├── UnsupportedModelError              the model needs something that is not there
    ├── RequestError (also ValueError)     this request can never be served; the engine is unharmed
    ├── QueueFullError                     the bounded queue is full; try again after a poll
    ├── WeightsMovedError                  weights lie elsewhere than captured; recapture, go on
    ├── EngineClosedError                  the engine was closed, by the caller or by a failed step
    └── StepError                          a step failed; every request it carried was ended

`graphattn._capture` has its own errors (`CaptureError` and below); it knows nothing of the runtime.
"""

from __future__ import annotations


class GraphAttnError(Exception):
    """Base of every error that graphattn raises on purpose."""


class ConfigError(GraphAttnError, ValueError):
    """An argument is wrong. Names the argument, what was wanted, what came, and the fix."""


class UnsupportedModelError(GraphAttnError):
    """The model cannot be served; the message says what is missing."""


class RequestError(GraphAttnError, ValueError):
    """A request that can never be served. The engine's state is unchanged."""


class QueueFullError(GraphAttnError):
    """The queue bound is reached. Poll and step, then submit again."""


class WeightsMovedError(GraphAttnError):
    """Weights lie elsewhere than when they were captured. Nothing was launched or changed; after
    `Engine.recapture`, or once the old tensors are back, the engine goes on."""


class EngineClosedError(GraphAttnError):
    """The engine is closed; the message says since when and why."""


class StepError(GraphAttnError):
    """A step failed. Every request in flight was ended with this error."""


def wrong(argument: str, wanted: str, got: object, fix: str) -> ConfigError:
    """The one shape of a configuration error."""
    return ConfigError(f"{argument}: wanted {wanted}, got {got!r}. {fix}")
