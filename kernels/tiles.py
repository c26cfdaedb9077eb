"""Checked-in tile tables of the attention kernels: plain arithmetic, without triton or a GPU.

There is no autotuning at run time or capture: a tile is a function of the architecture, the head
size, the rows that share it and the dtype, never of a bucket or of a length, so that a row's
attention is computed the same way in every step. `tests/kernels/budgets.json` holds what each
tile costs when compiled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_HEAD_DIM = 256
MAX_LATENT_VALUE_DIM = 512  # DeepSeek's entry: 512 values that are K and V,
MAX_LATENT_ROPE_DIM = 64  # and a rope key of 64
MAX_LATENT_DIM = MAX_LATENT_VALUE_DIM + MAX_LATENT_ROPE_DIM
MAX_LATENT_HEADS = 128
_CHUNK_UNIT = 128  # every block_n divides it, so the coarsest chunk of a model fits all its layers


@dataclass(frozen=True, slots=True)
class Tile:
    """One compiled shape: `block_m` query rows by `block_n` KV positions per iteration."""

    block_m: int  # rows = query places x query heads of one KV head; a power of two >= 16
    block_n: int  # KV positions of one iteration; a power of two >= 16
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """Tiles of one attention geometry, and what the sizes of a step's work lists follow from."""

    decode: Tile
    prefill: Tile
    prefill_block: int  # query places of one prefill item
    align: int  # KV positions; `row_begin` and chunks are multiples of it
    chunk: int  # KV positions of the smallest split of a decode row (prepare's `chunk`)


# (warps, stages, block_n) by padded head size and block_m, for 2-byte dtypes. The sm_80 table
# stays under 99 KiB of shared memory: it also serves sm_86, sm_89 and sm_120.
DECODE: dict[str, dict[int, dict[int, tuple[int, int, int]]]] = {
    "sm_80": {
        64: {16: (4, 3, 64), 32: (4, 3, 64), 64: (4, 2, 64)},
        128: {16: (4, 2, 64), 32: (4, 2, 64), 64: (8, 2, 64)},
        256: {16: (4, 2, 32), 32: (8, 2, 32), 64: (8, 2, 32)},
    },
    "sm_90": {
        64: {16: (4, 3, 64), 32: (4, 3, 64), 64: (4, 3, 64), 128: (8, 3, 64)},
        128: {16: (4, 3, 64), 32: (4, 3, 64), 64: (4, 2, 64), 128: (8, 2, 64)},
        256: {16: (4, 3, 32), 32: (8, 3, 32), 64: (8, 2, 32)},
    },
    "sm_100": {
        64: {16: (4, 3, 64), 32: (4, 3, 64), 64: (4, 3, 64), 128: (8, 3, 64)},
        128: {16: (4, 3, 64), 32: (4, 3, 64), 64: (4, 2, 64), 128: (8, 2, 64)},
        256: {16: (4, 3, 32), 32: (8, 3, 32), 64: (8, 2, 32)},
    },
}

# (block_m, block_n, warps, stages) by padded head size, for 2-byte dtypes.
PREFILL: dict[str, dict[int, tuple[int, int, int, int]]] = {
    "sm_80": {64: (128, 64, 8, 2), 128: (64, 64, 8, 2), 256: (64, 32, 8, 2)},
    "sm_90": {64: (128, 64, 8, 3), 128: (128, 64, 8, 2), 256: (64, 32, 8, 2)},
    "sm_100": {64: (128, 64, 8, 3), 128: (128, 64, 8, 2), 256: (64, 32, 8, 2)},
}

# Latent attention, (warps, stages, block_n) by block_m, for 2-byte dtypes and entries of up to
# 512 + 64 values; smaller ones take less of everything. 32 rows take more than the 99 KiB of shared
# memory that the small devices of sm_80's family have. Below 64 rows, more positions than rows lay
# the warps along the positions: along the rows, some would repeat the work of others.
LATENT: dict[str, dict[int, tuple[int, int, int]]] = {
    "sm_80": {16: (8, 2, 64), 32: (8, 2, 64)},
    "sm_90": {16: (8, 2, 64), 32: (8, 2, 64), 64: (8, 2, 64)},
    "sm_100": {16: (8, 2, 64), 32: (8, 2, 64), 64: (8, 2, 64)},
    **{arch: {16: (8, 2, 64)} for arch in ("sm_86", "sm_89", "sm_120", "sm_121")},
}
# FP8 entries are cast in registers before they are multiplied. Where all of a block goes through
# them, in tiles of 16 rows, 32 positions are what fits beside the 512 values of an entry; on sm_80,
# which has no cast, that is the only tile without spills.
_LATENT_FP8: dict[str, dict[int, tuple[int, int, int]]] = {
    "sm_90": {16: (8, 2, 32), 32: (8, 2, 64), 64: (8, 2, 64)},
    "sm_100": {16: (8, 2, 32), 32: (8, 2, 64), 64: (8, 2, 64)},
    **{arch: {16: (8, 2, 32)} for arch in ("sm_80", "sm_86", "sm_89", "sm_120", "sm_121")},
}
_PREFILL_FP8_256 = (32, 32, 8, 2)  # sm_80, heads of 256 values: its own tile would spill
_LATENT_FP32 = Tile(block_m=16, block_n=32, num_warps=8, num_stages=2)
_LATENT_FP32_VALUE_DIM = 128  # more spills in the loop, whatever the tile

# Triton's interpreter pays per operation, whatever the block: small tiles make small tests.
_INTERPRETED = Tile(block_m=16, block_n=16, num_warps=1, num_stages=1)


def arch_of(device: torch.device) -> str:
    """Architecture string of a device: "cpu" (the interpreter) or "sm_90" and the like.

    A fake CUDA device without a GPU, as an audit uses, has the tiles of "cpu".
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return "cpu"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def padded_head_dim(head_dim: int) -> int:
    """Columns of a head inside a kernel: a power of two >= 16."""
    return max(16, _power_of_two(head_dim))


def attention_tiles(
    arch: str,
    *,
    head_dim: int,
    group: int,
    decode_query_len: int,
    page_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
) -> AttentionTiles:
    """Tiles for `group` = query heads per KV head and decode rows of `decode_query_len` places.

    `dtype` is that of the queries, `kv_dtype` that of the pools: the same (None), or FP8.
    Raises `ValueError`, naming the argument, for an architecture or a geometry that has no tile.
    """
    for name, value, most in (
        ("head_dim", head_dim, MAX_HEAD_DIM),
        ("group", group, None),
        ("decode_query_len", decode_query_len, None),
        ("page_size", page_size, None),
    ):
        _check_range(name, value, most)
    _check_dtype(dtype, kv_dtype)
    rows = group * decode_query_len
    decode = _decode_tile(arch, head_dim, rows, dtype)
    prefill = _prefill_tile(arch, head_dim, dtype, fp8=_is_fp8(kv_dtype))
    return AttentionTiles(
        decode=decode,
        prefill=prefill,
        prefill_block=max(1, prefill.block_m // group),
        align=decode.block_n,
        chunk=_whole_chunk(16 * rows * (2 if _is_fp8(kv_dtype) else 1)),
    )


def latent_tiles(
    arch: str,
    *,
    head_dim: int,
    value_dim: int,
    heads: int,
    decode_query_len: int,
    page_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
) -> AttentionTiles:
    """Tiles of latent attention: `heads` query heads share entries of `head_dim` values.

    The first `value_dim` values of an entry are V. A tile's partials are value_dim * 4 bytes per
    row, written and read once, for `chunk` entries of head_dim values: the chunk keeps that below
    an eighth of the KV traffic of entries of 2 bytes or 1. `dtype` and `kv_dtype` as of
    `attention_tiles`. Raises `ValueError`, naming the argument, for an architecture or a geometry
    that has no tile.
    """
    for name, value, most in (
        ("heads", heads, MAX_LATENT_HEADS),
        ("value_dim", value_dim, MAX_LATENT_VALUE_DIM),
        ("head_dim - value_dim", head_dim - value_dim, MAX_LATENT_ROPE_DIM),
        ("decode_query_len", decode_query_len, None),
        ("page_size", page_size, None),
    ):
        _check_range(name, value, most)
    _check_dtype(dtype, kv_dtype)
    rows = heads * decode_query_len
    fp8 = _is_fp8(kv_dtype)
    decode = _latent_tile(arch, value_dim, rows, dtype, fp8=fp8)
    prefill = _latent_tile(arch, value_dim, MAX_LATENT_HEADS, dtype, fp8=fp8)
    return AttentionTiles(
        decode=decode,
        prefill=prefill,
        prefill_block=max(1, prefill.block_m // heads),
        align=decode.block_n,
        chunk=_whole_chunk(32 * rows * (2 if fp8 else 1)),
    )


def _decode_tile(arch: str, head_dim: int, rows: int, dtype: torch.dtype) -> Tile:
    """The tile that holds all rows of a KV head, or the largest one, which is then repeated."""
    wanted = max(16, _power_of_two(rows))
    if arch == "cpu":
        return Tile(min(wanted, 64), _INTERPRETED.block_n, 1, 1)
    table = DECODE[_table_arch(arch)][max(64, padded_head_dim(head_dim))]
    block_m = min(wanted, max(table))
    warps, stages, block_n = table[block_m]
    return _for_dtype(Tile(block_m, block_n, warps, stages), head_dim, dtype)


def _prefill_tile(arch: str, head_dim: int, dtype: torch.dtype, *, fp8: bool) -> Tile:
    if arch == "cpu":
        return _INTERPRETED
    family, padded = _table_arch(arch), max(64, padded_head_dim(head_dim))
    sizes = PREFILL[family][padded]
    if fp8 and (family, padded) == ("sm_80", 256):
        sizes = _PREFILL_FP8_256
    return _for_dtype(Tile(*sizes), head_dim, dtype)


def _latent_tile(arch: str, value_dim: int, rows: int, dtype: torch.dtype, *, fp8: bool) -> Tile:
    """The tile that holds all `rows` of an item, or the largest one, which is then repeated."""
    wanted = max(16, _power_of_two(rows))
    if arch == "cpu":
        return Tile(min(wanted, 32), _INTERPRETED.block_n, 1, 1)
    tables = _LATENT_FP8 if fp8 else LATENT
    table = tables[arch if arch in tables else _table_arch(arch)]
    if dtype == torch.float32:
        if value_dim > _LATENT_FP32_VALUE_DIM:
            raise ValueError(
                f"dtype: float32 has tiles for latents of at most {_LATENT_FP32_VALUE_DIM} values "
                f"on {arch}, got {value_dim}: load the model in bfloat16"
            )
        return _LATENT_FP32
    block_m = min(wanted, max(table))
    warps, stages, block_n = table[block_m]
    return Tile(block_m, block_n, warps, stages)


def _for_dtype(tile: Tile, head_dim: int, dtype: torch.dtype) -> Tile:
    """fp32 takes three products for one and twice the bytes: fewer rows, half the positions."""
    if dtype != torch.float32:
        return tile
    return Tile(
        block_m=min(tile.block_m, 32 if head_dim <= 64 else 16),
        block_n=tile.block_n // 2,
        num_warps=8 if head_dim > 128 else 4,
        num_stages=2,
    )


def _table_arch(arch: str) -> str:
    """Table of an architecture: its own, its family's, or sm_80's."""
    if arch in DECODE:
        return arch
    if arch == "sm_103":
        return "sm_100"
    if arch in ("sm_86", "sm_87", "sm_89", "sm_120", "sm_121"):
        return "sm_80"
    raise ValueError(f"arch: wanted cpu, sm_80 or newer, got {arch!r}")


def _is_fp8(kv_dtype: torch.dtype | None) -> bool:
    return kv_dtype == torch.float8_e4m3fn


def _whole_chunk(least: int) -> int:
    return -(-max(256, least) // _CHUNK_UNIT) * _CHUNK_UNIT


def _check_range(name: str, value: int, most: int | None) -> None:
    if value < 1:
        raise ValueError(f"{name}: wanted at least 1, got {value}")
    if most is not None and value > most:
        raise ValueError(f"{name}: wanted at most {most}, got {value}")


def _check_dtype(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"dtype: wanted bfloat16, float16 or float32, got {dtype}")
    if kv_dtype not in (None, dtype, torch.float8_e4m3fn):
        raise ValueError(f"kv_dtype: wanted {dtype} or float8_e4m3fn, got {kv_dtype}")


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
