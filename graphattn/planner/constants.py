"""Everything that is assumed beside a configuration and a GPU's peak figures, listed once.

Every row of every table uses the same values. Three were fitted to the measurement in
docs/planner.md and say so.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Constant:
    """A value and where it comes from."""

    name: str
    value: float
    unit: str
    source: str


MEMORY_SHARE = Constant(
    "memory_share",
    0.9,
    "of the GPU's memory",
    "default of graphattn (sizing.GPU_MEMORY_SHARE) and of vLLM (gpu_memory_utilization)",
)
RESERVE = Constant(
    "reserve",
    6 * 2**30,
    "bytes",
    "assumed: activations of a step of 8,192 tokens, communication buffers, captured graphs",
)
PAGE_SIZE = Constant("page_size", 64, "tokens", "default of graphattn.capture")
BANDWIDTH = Constant(
    "bandwidth",
    0.9,
    "of the peak",
    "FlashMLA's README: 3,000 GB/s on an H800 of 3,350 GB/s, memory-bound",
)
MATRIX_RATE = Constant(
    "matrix_rate",
    0.59,
    "of the peak",
    "FlashMLA's README, first release: 580 TFLOP/s on an H800 of 989, compute-bound",
)
LINK = Constant(
    "link",
    0.82,
    "of the peak",
    "NVIDIA/nccl-tests issue 212: 370 GB/s of 450 GB/s are left by the protocol",
)
MESSAGE = Constant(
    "message", 10e-6, "s", "assumed: one NCCL collective of a few bytes on one NVLink node"
)
ACCEPTANCE = Constant(
    "acceptance",
    0.81,
    "of each draft",
    "vllm-project/vllm pull request 12755: 81 to 82.3 % on DeepSeek-R1 with one draft token",
)
EXPERT_RATE = Constant(
    "expert_rate",
    0.085,
    "of the peak",
    "fitted: grouped products of routed experts, each split over all GPUs, and what lies between",
)
HOST_STEP = Constant("host_step", 13e-3, "s", "fitted: a step's cost that is nobody's in it")
HOST_ROW = Constant(
    "host_row",
    75e-6,
    "s",
    "fitted: a decode row's cost outside the model: scheduler, sampler, detokenizer, client",
)

CONSTANTS = tuple(value for value in globals().values() if isinstance(value, Constant))
