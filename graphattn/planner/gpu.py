"""Peak figures of a GPU, by name or as given.

Memory is what the driver reports (`nvidia-smi`, MiB); the rest are the vendor's figures for the SXM
module: dense matmul rates, without sparsity, and NVLink in one direction.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from graphattn.errors import wrong


@dataclass(frozen=True, slots=True)
class GPU:
    """One GPU."""

    name: str
    memory: float  # bytes
    bandwidth: float  # of memory, bytes/s
    bf16: float  # operations/s
    fp8: float  # operations/s; a GPU without FP8 units: its bf16 rate
    link: float  # to the other GPUs of its group, bytes/s in one direction


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("a100", 81_920 * 2**20, 2.039e12, 312e12, 312e12, 300e9),
        GPU("h100", 81_559 * 2**20, 3.35e12, 989e12, 1979e12, 450e9),
        GPU("h200", 143_771 * 2**20, 4.8e12, 989e12, 1979e12, 450e9),
        GPU("b200", 183_359 * 2**20, 8.0e12, 2250e12, 4500e12, 900e9),
    )
}
# Units of figures that are given in place of a name.
UNITS = {"memory": 2**30, "bandwidth": 1e9, "bf16": 1e12, "fp8": 1e12, "link": 1e9}
EXAMPLE = "memory=140,bandwidth=4800,bf16=989,fp8=1979,link=450"
assert set(UNITS) == {f.name for f in fields(GPU)} - {"name"}


def find_gpu(text: str) -> GPU:
    """A GPU of the table, or one from its figures: GiB, GB/s, TFLOP/s, TFLOP/s, GB/s."""
    if text.lower() in GPUS:
        return GPUS[text.lower()]
    pairs = [part.partition("=")[::2] for part in text.split(",")]
    try:
        given = {name: float(value) * UNITS[name] for name, value in pairs}
    except (KeyError, ValueError):
        given = {}
    if set(given) != set(UNITS) or min(given.values()) <= 0 or len(pairs) != len(UNITS):
        raise wrong("--gpu", f"{', '.join(GPUS)}, or figures", text, f"Say --gpu {EXAMPLE}.")
    return GPU("own figures", **given)
