"""What the package offers by name; `graphattn` itself loads it with the first of these names."""

from graphattn import bounds, convert, ops
from graphattn._capture.errors import CaptureError
from graphattn.aio import AsyncEngine, EventStream
from graphattn.bounds import Bounds
from graphattn.calibrating import calibrate_kv
from graphattn.capturing import capture
from graphattn.checks import audit, verify
from graphattn.config import Bucket
from graphattn.dcp import DCP
from graphattn.difference import ReportDiff
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
    WeightsMovedError,
)
from graphattn.footprint import Footprint
from graphattn.graph import Graph
from graphattn.groups import VirtualGroup
from graphattn.metadata import StepRows
from graphattn.models.contract import AttentionLayer
from graphattn.mtp import MTP
from graphattn.plan import Plan, Work
from graphattn.report import BucketReport, EngineReport, Stats
from graphattn.request import Completion, Event, FinishReason, Request, SamplingParams
from graphattn.step_buffers import StepBuffers

__all__ = [
    "DCP",
    "MTP",
    "AsyncEngine",
    "AttentionLayer",
    "Bounds",
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
    "Footprint",
    "Graph",
    "GraphAttnError",
    "NGram",
    "Plan",
    "QueueFullError",
    "ReportDiff",
    "Request",
    "RequestError",
    "SamplingParams",
    "Stats",
    "StepBuffers",
    "StepError",
    "StepRows",
    "UnsupportedModelError",
    "VirtualGroup",
    "WeightsMovedError",
    "Work",
    "audit",
    "bounds",
    "calibrate_kv",
    "capture",
    "convert",
    "ops",
    "verify",
]
