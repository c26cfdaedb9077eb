"""Static-shape, CUDA-graph-friendly attention runtime: one captured graph per decode step."""

from graphattn import bounds, convert, ops
from graphattn._capture.errors import CaptureError
from graphattn.aio import AsyncEngine, EventStream
from graphattn.capturing import capture
from graphattn.config import Bucket
from graphattn.dcp import DCP
from graphattn.draft import NGram
from graphattn.draft_model import DraftModel
from graphattn.engine import Engine
from graphattn.errors import (
    ConfigError,
    EngineClosedError,
    GraphAttnError,
    QueueFullError,
    RequestError,
    StepError,
    UnsupportedModelError,
)
from graphattn.groups import VirtualGroup
from graphattn.mtp import MTP
from graphattn.plan import Plan, Work
from graphattn.report import BucketReport, EngineReport, Stats
from graphattn.request import Completion, Event, FinishReason, Request, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "DCP",
    "MTP",
    "AsyncEngine",
    "Bucket",
    "BucketReport",
    "CaptureError",
    "Completion",
    "ConfigError",
    "DraftModel",
    "Engine",
    "EngineClosedError",
    "EngineReport",
    "Event",
    "EventStream",
    "FinishReason",
    "GraphAttnError",
    "NGram",
    "Plan",
    "QueueFullError",
    "Request",
    "RequestError",
    "SamplingParams",
    "Stats",
    "StepError",
    "UnsupportedModelError",
    "VirtualGroup",
    "Work",
    "bounds",
    "capture",
    "convert",
    "ops",
]
