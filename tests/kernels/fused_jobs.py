"""Compile jobs of the kernels that are fused within a layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from graphattn.kernels.absorb_query import absorb_constants, absorb_query_kernel
from graphattn.kernels.add_rms_norm import add_rms_norm_kernel, norm_constants
from graphattn.kernels.attend_latent_merge import latent_merge_constants, latent_merge_kernel
from graphattn.kernels.attend_launch import precision_constants
from graphattn.kernels.fp8 import BITS, PLAIN
from graphattn.kernels.gated_mul import BLOCK, gated_mul_kernel
from graphattn.kernels.latent_norm_write import latent_norm_constants, latent_norm_write_kernel
from graphattn.kernels.rope_write import rope_constants, rope_write_kernel
from tests.aot import Job
from tests.kernels.jobs import TYPES, job_of

BF16 = torch.bfloat16
ANGLES = {"ANGLE_UNIT": 16, "COS_PAIR": 1, "SIN_PAIR": 1, "ROUND": True}


def add_rms_norm_job(
    arch: str, width: int, *, sandwich: bool = False, dtype: torch.dtype = BF16
) -> tuple[str, Job]:
    constants = norm_constants(width, 16, "offset" if sandwich else "rounded")
    constants |= {} if sandwich else {"x_weight_ptr": None}
    name = f"add_rms_norm {TYPES[dtype]} {width}" + " sandwich" * sandwich
    return name, job_of(add_rms_norm_kernel, arch, dtype, constants)


def rope_write_job(
    arch: str, heads: int, kv_heads: int, dim: int, *, norm: bool = False, fp8: bool = False
) -> tuple[str, Job]:
    constants: dict[str, Any] = rope_constants(heads, kv_heads, dim, dim // 2)
    constants |= {"STRIDE_UNIT": 16, "PAGE_SIZE": 64, "STYLE": "rounded", "QUANTISE": fp8}
    constants |= {"PAIRS_IN": False, "PAIRS_OUT": False} | ANGLES
    constants |= {"K_SCALE_HEAD": int(fp8), "V_SCALE_HEAD": int(fp8)}
    constants |= {} if norm else {"q_weight_ptr": None, "k_weight_ptr": None}
    name = f"rope_write bf16 {heads}+{kv_heads}x{dim}" + " norm" * norm + " fp8 KV" * fp8
    reading = BITS if fp8 else PLAIN
    return name, job_of(rope_write_kernel, arch, BF16, constants, reading=reading)


def latent_norm_write_job(arch: str, *, fp8: bool = False) -> tuple[str, Job]:
    constants: dict[str, Any] = latent_norm_constants(1536, 512, 64)
    constants |= {"STRIDE_UNIT": 16, "PAGE_SIZE": 64, "STYLE": "rounded", "QUANTISE": fp8}
    constants |= {"PAIRS_IN": True, "PAIRS_OUT": False} | ANGLES
    name = "latent_norm_write bf16 1536 512+64" + " fp8 KV" * fp8
    reading = BITS if fp8 else PLAIN
    return name, job_of(latent_norm_write_kernel, arch, BF16, constants, reading=reading)


def absorb_query_job(arch: str, *, dtype: torch.dtype = BF16) -> tuple[str, Job]:
    constants: dict[str, Any] = absorb_constants(128, 512, 64, dtype) | ANGLES
    constants |= {"STRIDE_UNIT": 16, "PAIRS_IN": True, "PAIRS_OUT": False}
    constants |= precision_constants(dtype, interpreted=False)
    name = f"absorb_query {TYPES[dtype]} 128 to 512"
    return name, job_of(absorb_query_kernel, arch, dtype, constants)


def latent_merge_job(arch: str, *, dtype: torch.dtype = BF16) -> tuple[str, Job]:
    constants: dict[str, Any] = latent_merge_constants(16, 512, 128, 256, dtype)
    constants |= {"STRIDE_UNIT": 16} | precision_constants(dtype, interpreted=False)
    name = f"latent_merge {TYPES[dtype]} 512 to 128"
    return name, job_of(latent_merge_kernel, arch, dtype, constants)


def gated_mul_job(arch: str, width: int, activation: str) -> tuple[str, Job]:
    constants = {"STRIDE_UNIT": 16, "WIDTH": width, "BLOCK": BLOCK, "ACTIVATION": activation}
    name = f"gated_mul bf16 {width} {activation}"
    return name, job_of(gated_mul_kernel, arch, BF16, constants)


def main_fused_jobs(arch: str) -> Iterator[tuple[str, Job]]:
    """As Llama, Qwen3 and DeepSeek run them."""
    yield add_rms_norm_job(arch, 4096)
    yield rope_write_job(arch, 32, 8, 128)
    yield rope_write_job(arch, 32, 8, 128, norm=True)
    yield latent_norm_write_job(arch)
    yield absorb_query_job(arch)
    yield latent_merge_job(arch)
    yield gated_mul_job(arch, 14336, "silu")


def more_fused_jobs(arch: str) -> Iterator[tuple[str, Job]]:
    """Wider, normed twice, and into FP8 pages."""
    yield add_rms_norm_job(arch, 576, dtype=torch.float32)
    yield add_rms_norm_job(arch, 16384)
    yield add_rms_norm_job(arch, 5376, sandwich=True)
    yield rope_write_job(arch, 64, 8, 256, norm=True)
    yield rope_write_job(arch, 32, 8, 128, norm=True, fp8=True)
    yield latent_norm_write_job(arch, fp8=True)
    yield absorb_query_job(arch, dtype=torch.float32)
    yield latent_merge_job(arch, dtype=torch.float32)
    yield gated_mul_job(arch, 14336, "gelu_tanh")
