"""float8_e4m3fn inside kernels: to and from its bits, and what a launcher needs to know of it.

A byte is a sign, 4 exponent bits (bias 7) and 3 mantissa bits; exponent 0 holds the subnormals, all
ones but the sign is NaN, and there is no infinity.

Writing rounds in integer arithmetic everywhere: the interpreter's cast rounds otherwise, and below
sm_89 there is none. Reading casts where the hardware does, and elsewhere moves bits: a block of KV
is decoded once per iteration of the attention, which a multiprocessor without the cast pays for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FP8 = torch.float8_e4m3fn

# How a kernel reads a pool: as values of q's dtype, by a cast, or from its bits.
PLAIN, CAST, BITS = 0, 1, 2
_BITS = tl.constexpr(BITS)

_MAX = tl.constexpr(0x43E00000)  # bits of the fp32 448
_LEAST_NORMAL = tl.constexpr(0x3C800000)  # 2**-6
_INFINITY = tl.constexpr(0x7F800000)
_REBIAS = tl.constexpr((127 - 7) << 3)
_UNIT = tl.constexpr(2.0**14)  # its fp32 neighbours are 2**-9 apart, like the subnormals of FP8
_UNIT_BITS = tl.constexpr((127 + 14) << 23)


@triton.jit
def quantise(b_x, b_scale):
    """Bytes of fp8(b_x / b_scale), b_x fp32: to nearest, ties to even, saturated; NaN stays NaN."""
    b_bits = tl.div_rn(b_x, b_scale).to(tl.int32, bitcast=True)
    b_magnitude = b_bits & 0x7FFFFFFF
    b_finite = tl.minimum(b_magnitude, _MAX)
    b_normal = ((b_finite + 0x7FFFF + ((b_finite >> 20) & 1)) >> 20) - _REBIAS
    # An addition that rounds as the hardware does, to whole multiples of the least subnormal.
    b_shifted = b_finite.to(tl.float32, bitcast=True) + _UNIT
    b_tiny = b_shifted.to(tl.int32, bitcast=True) - _UNIT_BITS
    b_code = tl.where(b_finite < _LEAST_NORMAL, b_tiny, b_normal)
    b_code = tl.where(b_magnitude > _INFINITY, 0x7F, b_code)
    return (b_code | ((b_bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def entry_values(b_x, DTYPE: tl.constexpr, READ: tl.constexpr):
    """Loaded entries of a pool as values of DTYPE, exactly."""
    if READ == _BITS:
        b_bits = b_x.to(tl.int32)
        b_code = b_bits & 0x7F
        b_magnitude = (b_code << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
        b_magnitude = tl.where(b_code == 0x7F, float("nan"), b_magnitude)
        return tl.where(b_bits > 0x7F, -b_magnitude, b_magnitude).to(DTYPE)
    return b_x.to(DTYPE)


def pool_reading(dtype: torch.dtype, arch: str) -> int:
    """How kernels for `arch` ("cpu": interpreted) read pools of `dtype`: PLAIN, CAST or BITS."""
    if dtype != FP8:
        return PLAIN
    return CAST if arch != "cpu" and int(arch.removeprefix("sm_")) >= 89 else BITS


def as_read(pool: Tensor, reading: int) -> Tensor:
    """The pool as a kernel takes it."""
    return pool.view(torch.uint8) if reading == BITS else pool


def check_scale(name: str, scale: Tensor | None, sizes: tuple[int, ...], pool: Tensor) -> None:
    """Raise `ValueError` unless `scale` is None or fits an FP8 pool: fp32, of one of `sizes`."""
    if scale is None:
        return
    if pool.dtype != FP8:
        raise ValueError(
            f"{name}: wanted None for pools of {pool.dtype}, got a scale: it is of FP8 entries"
        )
    if (
        scale.dim() != 1
        or scale.shape[0] not in sizes
        or scale.dtype != torch.float32
        or not scale.is_contiguous()
        or scale.device != pool.device
    ):
        wanted = " or ".join(f"[{size}]" for size in sizes)
        raise ValueError(
            f"{name}: wanted contiguous float32 {wanted} on {pool.device}, got {scale.dtype} "
            f"{list(scale.shape)} with strides {list(scale.stride())} on {scale.device}"
        )


def scale_step(scale: Tensor | None) -> int:
    """Elements from the scale of a head to that of the next; 0 when all share one."""
    return 0 if scale is None or scale.shape[0] == 1 else 1
