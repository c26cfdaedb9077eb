"""Compile jobs of the attention kernels with the tiles of the table, and of the KV writes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from graphattn.kernels.attend import Shape, tile_constants
from graphattn.kernels.attend_decode import decode_kernel, merge_kernel
from graphattn.kernels.attend_latent import LatentShape, latent_constants
from graphattn.kernels.attend_latent_decode import latent_decode_kernel
from graphattn.kernels.attend_latent_prefill import latent_prefill_kernel
from graphattn.kernels.attend_launch import merge_constants
from graphattn.kernels.attend_prefill import prefill_kernel
from graphattn.kernels.fp8 import BITS, CAST, FP8, PLAIN, pool_reading
from graphattn.kernels.kv_write import kv_write_kernel
from graphattn.kernels.latent_write import latent_write_kernel
from graphattn.kernels.tiles import Tile, attention_tiles, latent_tiles
from tests.aot import ARCHS, Job

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
ELEMENTS = {
    *("q_ptr", "k_ptr", "v_ptr", "k_pool_ptr", "v_pool_ptr", "out_ptr"),
    *("latent_ptr", "pool_ptr", "cos_ptr", "sin_ptr", "q_weight_ptr", "k_weight_ptr"),
    *("x_ptr", "residual_ptr", "x_weight_ptr", "weight_ptr", "normed_ptr", "summed_ptr"),
    *("gate_ptr", "up_ptr", "expanded_ptr"),
}
SCALES = {"k_scale_ptr", "v_scale_ptr", "scale_ptr"}
FLOATS = {"partial_out_ptr", "partial_lse_ptr", "lse_ptr", "sinks_ptr", *SCALES}
POOLS = {"k_pool_ptr", "v_pool_ptr", "pool_ptr"}
FP8_TYPES = {CAST: "fp8e4nv", BITS: "u8"}  # what a kernel takes an FP8 pool for


def job_of(
    kernel: Any,
    arch: str,
    dtype: torch.dtype,
    constants: Mapping[str, Any],
    tile: Tile | None = None,
    reading: int = PLAIN,
) -> Job:
    """Compile job of a kernel whose pointers hold `dtype`, fp32 or indices, by their names.

    With `reading` CAST or BITS the pools are FP8 and have scales. `constants` may hold options of
    the launch, as launchers pass them.
    """
    types = {"scale": "fp32", "softcap": "fp32", "eps": "fp32", "kv_slot_ptr": "*i64"}
    if reading == PLAIN:
        scales = inspect.signature(kernel.fn).parameters.keys() & SCALES
        constants = dict.fromkeys(scales) | dict(constants)
    else:
        types |= dict.fromkeys(POOLS, f"*{FP8_TYPES[reading]}")
    for name in inspect.signature(kernel.fn).parameters:
        if name.endswith("_ptr"):
            element = TYPES[dtype] if name in ELEMENTS else "fp32" if name in FLOATS else "i32"
            types.setdefault(name, f"*{element}")
    constants = dict(constants)
    warps = constants.pop("num_warps", tile.num_warps if tile else 4)
    stages = constants.pop("num_stages", tile.num_stages if tile else 3)
    fusion = constants.pop("enable_fp_fusion", True)
    names = inspect.signature(kernel.fn).parameters.keys() - constants.keys()
    return Job(
        kernel.fn.__module__.rpartition(".")[2],
        kernel.fn.__name__,
        arch,
        {name: types[name] for name in sorted(names) if name in types},
        constants,
        warps,
        stages,
        fusion,
    )


def tile_job(
    kind: str,
    arch: str,
    head_dim: int,
    group: int,
    query_len: int = 1,
    *,
    page_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    softcap: bool = False,
    sinks: bool = False,
    kv_dtype: torch.dtype | None = None,
) -> tuple[str, Job]:
    """Name and compile job of the decode or the prefill kernel with its tile from the table."""
    tiles = attention_tiles(
        arch,
        head_dim=head_dim,
        group=group,
        decode_query_len=query_len,
        page_size=page_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    tile: Tile = getattr(tiles, kind)
    reading = pool_reading(kv_dtype or dtype, arch)
    constants = tile_constants(
        Shape(8 * group, 8, head_dim, page_size),
        dtype,
        stride_unit=16,
        entries=(head_dim, head_dim),
        softcap=softcap,
        interpreted=False,
        reading=reading,
        scale_steps=(0, 0) if reading == PLAIN else (1, 1),
    ) | {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
    if kind == "prefill" and not sinks:
        constants["sinks_ptr"] = None
    kernel = decode_kernel if kind == "decode" else prefill_kernel
    extras = [f"page {page_size}"] * (page_size != 64) + ["softcap"] * softcap + ["sinks"] * sinks
    extras += ["fp8 KV"] * (reading != PLAIN)
    name = f"{kind} {TYPES[dtype]} D={head_dim} {tile.block_m}x{tile.block_n}"
    return " ".join([name, *extras]), job_of(kernel, arch, dtype, constants, tile, reading)


def latent_job(
    kind: str,
    arch: str,
    heads: int,
    query_len: int = 1,
    *,
    value_dim: int = 512,
    rope_dim: int = 64,
    page_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
) -> tuple[str, Job]:
    """Name and compile job of a kernel of latent attention with its tile from the table."""
    tiles = latent_tiles(
        arch,
        head_dim=value_dim + rope_dim,
        value_dim=value_dim,
        heads=heads,
        decode_query_len=query_len,
        page_size=page_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    tile: Tile = getattr(tiles, kind)
    reading = pool_reading(kv_dtype or dtype, arch)
    constants = latent_constants(
        LatentShape(heads, value_dim + rope_dim, value_dim, page_size),
        dtype,
        stride_unit=16,
        entry=value_dim + rope_dim,
        interpreted=False,
        reading=reading,
    ) | {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
    kernel = latent_decode_kernel if kind == "decode" else latent_prefill_kernel
    name = f"latent {kind} {TYPES[dtype]} {value_dim}+{rope_dim} {tile.block_m}x{tile.block_n}"
    name += f" page {page_size}" * (page_size != 64) + " fp8 KV" * (reading != PLAIN)
    return name, job_of(kernel, arch, dtype, constants, tile, reading)


def merge_job(
    arch: str, *, heads: int = 32, dim: int = 128, sinks: bool = False
) -> tuple[str, Job]:
    constants = merge_constants(heads, dim, 32) | ({} if sinks else {"sinks_ptr": None})
    job = job_of(merge_kernel, arch, torch.bfloat16, constants)
    return f"merge bf16 D={dim} S=32" + " sinks" * sinks, job


def latent_write_job(arch: str, *, fp8: bool = False) -> tuple[str, Job]:
    constants = {"STRIDE_UNIT": 16, "D": 576, "D_PADDED": 1024, "PAGE_SIZE": 64}
    constants |= {"QUANTISE": fp8, "VALUE_DIM": 512}
    reading = BITS if fp8 else PLAIN
    job = job_of(latent_write_kernel, arch, torch.bfloat16, constants, reading=reading)
    return "latent_write bf16 576" + " fp8 KV" * fp8, job


def kv_write_job(arch: str, *, fp8: bool = False) -> tuple[str, Job]:
    constants = {
        "STRIDE_UNIT": 16,
        "KV_HEADS": 8,
        "KV_HEADS_PADDED": 8,
        "D": 128,
        "D_PADDED": 128,
        "PAGE_SIZE": 64,
        "QUANTISE": fp8,
        "K_SCALE_HEAD": int(fp8),
        "V_SCALE_HEAD": int(fp8),
    }
    reading = BITS if fp8 else PLAIN
    job = job_of(kv_write_kernel, arch, torch.bfloat16, constants, reading=reading)
    return "kv_write bf16 8x128" + " fp8 KV" * fp8, job


def main_jobs() -> Iterator[tuple[str, Job]]:
    """The main tile set, on every architecture."""
    for arch in ARCHS:
        yield kv_write_job(arch)
        yield merge_job(arch)
        for head_dim in (64, 128, 256):
            yield tile_job("decode", arch, head_dim, 4)
            yield tile_job("prefill", arch, head_dim, 4)
        yield tile_job("decode", arch, 128, 8, 4)
        yield latent_write_job(arch)
        yield latent_job("decode", arch, 16)
        if arch != "sm_80":  # its table has no tile of 64 rows
            yield latent_job("decode", arch, 128)


def more_jobs() -> Iterator[tuple[str, Job]]:
    """The other tiles of the table, other dtypes, and the options."""
    for arch in ARCHS:
        for head_dim in (64, 128, 256):
            for query_len in (2, 4, 8):
                yield tile_job("decode", arch, head_dim, 16, query_len)
            yield tile_job("prefill", arch, head_dim, 4, softcap=True, sinks=True)
        for kind in ("decode", "prefill"):
            yield tile_job(kind, arch, 128, 4, dtype=torch.float16)
            yield tile_job(kind, arch, 64, 4, dtype=torch.float32)
            yield tile_job(kind, arch, 256, 4, dtype=torch.float32)
        yield tile_job("decode", arch, 128, 4, page_size=16, softcap=True)
        yield tile_job("decode", arch, 80, 3, 2, page_size=16)
        yield merge_job(arch, sinks=True)
        yield merge_job(arch, heads=128, dim=512)
        yield latent_job("decode", arch, 16, 2)
        yield latent_job("decode", arch, 128, page_size=16)
        yield latent_job("decode", arch, 128, dtype=torch.float16)
        yield latent_job("decode", arch, 16, value_dim=48, rope_dim=16, page_size=16)
        yield latent_job("decode", arch, 16, value_dim=128, dtype=torch.float32)
        for kind in ("decode", "prefill"):
            yield tile_job(kind, arch, 64, 4, dtype=torch.float32, kv_dtype=FP8)
            yield tile_job(kind, arch, 128, 4, dtype=torch.float16, kv_dtype=FP8, page_size=16)
        yield tile_job("decode", arch, 64, 16, 8, kv_dtype=FP8)
        yield latent_job("decode", arch, 32, kv_dtype=FP8)
        yield latent_job("prefill", arch, 128, kv_dtype=FP8)
        yield latent_job("prefill", arch, 128)
        yield latent_job("prefill", arch, 128, page_size=16)


def main_fp8_jobs() -> Iterator[tuple[str, Job]]:
    """FP8 KV, read from bits and by a cast."""
    yield tile_job("decode", "sm_80", 128, 4, kv_dtype=FP8)
    yield tile_job("decode", "sm_90", 128, 4, kv_dtype=FP8)
    yield latent_job("decode", "sm_90", 16, kv_dtype=FP8)
    yield kv_write_job("sm_90", fp8=True)


def fp8_jobs() -> Iterator[tuple[str, Job]]:
    """FP8 KV: tiles of each kind, and the writes."""
    for arch in ARCHS:
        yield kv_write_job(arch, fp8=True)
        yield latent_write_job(arch, fp8=True)
        for head_dim in (64, 128, 256):
            yield tile_job("decode", arch, head_dim, 4, kv_dtype=FP8)
            yield tile_job("prefill", arch, head_dim, 4, kv_dtype=FP8)
        yield tile_job("decode", arch, 128, 8, 4, kv_dtype=FP8)
        yield latent_job("decode", arch, 16, kv_dtype=FP8)
        if arch != "sm_80":
            yield latent_job("decode", arch, 128, kv_dtype=FP8)
