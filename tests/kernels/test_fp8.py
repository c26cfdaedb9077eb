"""float8_e4m3fn: the oracle against the format's definition, the conversions against the oracle.

In each direction every input that matters is tried: all 256 bytes, and all values of bf16 and fp16,
among them every tie between neighbours, the subnormals, and what is beyond the largest value.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from graphattn.kernels.fp8 import BITS, CAST, FP8, PLAIN, entry_values, pool_reading, quantise
from graphattn.kernels.fp8_cpu import quantise as quantise_cpu
from graphattn.kernels.fp8_cpu import widen
from graphattn.kernels.fp8_ref import decode_byte_ref, encode_byte_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EVERY_BYTE = torch.arange(256, dtype=torch.uint8)
FINITE = [byte for byte in range(128) if byte != 0x7F]  # in order of value, without a sign


def every_value(dtype: torch.dtype) -> Tensor:
    """All values of a 2-byte dtype, infinities and NaN among them, as fp32."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).float()
    return values.nan_to_num(torch.nan, torch.inf, -torch.inf)  # no signalling NaN


def around_ties() -> Tensor:
    """fp32: each midpoint of neighbouring values, and what lies next to it on both sides."""
    values = [decode_byte_ref(byte) for byte in FINITE]
    ties = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(values)])
    up, down = (torch.nextafter(ties, torch.tensor(x)) for x in (math.inf, 0.0))
    beyond = torch.tensor([448.0, 463.99, 464.0, 465.0, 480.0, 1e30, math.inf, 1e-30, 1e-45, 0.0])
    positive = torch.cat([ties, up, down, beyond])
    return torch.cat([positive, -positive, torch.tensor([math.nan, -math.nan])])


INPUTS = {
    "bf16": every_value(torch.bfloat16),
    "fp16": every_value(torch.float16),
    "ties": around_ties(),
}


def inputs(name: str, scale: float) -> Tensor:
    """Quotients by `scale` are to lie at the ties, where a product with 1 / scale would not."""
    return INPUTS[name] * scale if name == "ties" else INPUTS[name]


def expected(values: Tensor) -> Tensor:
    return torch.tensor([encode_byte_ref(x) for x in values.tolist()], dtype=torch.uint8)


def assert_same_bytes(got: Tensor, wanted: Tensor) -> None:
    """Equal, but for the sign of NaN."""
    nan = (wanted & 0x7F) == 0x7F
    assert torch.equal((got.cpu() & 0x7F)[nan], wanted[nan] & 0x7F)
    assert torch.equal(got.cpu()[~nan], wanted[~nan])


def test_the_oracle_rounds_to_the_nearest_value() -> None:
    """By its definition, in rational numbers: no byte's value is nearer, and ties go to even."""
    values = [Fraction(decode_byte_ref(byte)) for byte in FINITE]
    for value in around_ties().tolist() + every_value(torch.bfloat16)[::997].tolist():
        byte = encode_byte_ref(value)
        if math.isnan(value):
            assert byte & 0x7F == 0x7F
            continue
        assert (byte & 0x80 != 0) == (math.copysign(1.0, value) < 0)
        size = Fraction(min(abs(value), 448.0))
        distances = [abs(size - x) for x in values]
        least = min(distances)
        nearest = [b for b, d in zip(FINITE, distances, strict=True) if d == least]
        assert byte & 0x7F == min(nearest, key=lambda b: b % 2)


def test_the_oracle_reads_what_torch_reads() -> None:
    values = torch.tensor([decode_byte_ref(byte) for byte in range(256)])
    torch.testing.assert_close(
        EVERY_BYTE.view(FP8).float(), values, atol=0.0, rtol=0.0, equal_nan=True
    )
    assert values.nan_to_num().abs().max() == 448.0


@pytest.mark.parametrize("name", INPUTS)
def test_the_oracle_writes_what_torch_writes(name: str) -> None:
    values = INPUTS[name].clamp(-448.0, 448.0)  # older releases do not saturate
    assert_same_bytes(values.to(FP8).view(torch.uint8), expected(values))


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("scale", [None, 0.75, 3e-3])
def test_cpu_writes(name: str, scale: float | None) -> None:
    values = inputs(name, scale or 1.0)
    factor = None if scale is None else torch.tensor(scale)
    quotients = values if factor is None else values / factor
    got = quantise_cpu(values, factor).view(torch.uint8)
    assert_same_bytes(got, expected(quotients))


def test_cpu_reads() -> None:
    for shape in ((256,), (4, 64), (2, 0)):
        entries = EVERY_BYTE[: math.prod(shape)].view(FP8).view(shape)
        torch.testing.assert_close(
            widen(entries), entries.float(), atol=0.0, rtol=0.0, equal_nan=True
        )


@triton.jit
def _quantise(x_ptr, scale, out_ptr, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(x_ptr + o, mask=o < n, other=0.0)
    tl.store(out_ptr + o, quantise(b_x, scale), mask=o < n)


@triton.jit
def _read(bytes_ptr, out_ptr, READ: tl.constexpr):
    o = tl.arange(0, 256)
    tl.store(out_ptr + o, entry_values(tl.load(bytes_ptr + o), tl.float32, READ))


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # NumPy's, of a quotient
@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("scale", [1.0, 0.75, 3e-3])
def test_kernels_write(name: str, scale: float) -> None:
    """The same code compiled and interpreted: all of it is integer arithmetic, a division that is
    rounded as IEEE has it, and one addition."""
    values = inputs(name, scale).to(DEVICE)
    got = torch.empty(len(values), dtype=torch.uint8, device=DEVICE)
    block = 1 << 14
    _quantise[(triton.cdiv(len(values), block),)](values, scale, got, len(values), BLOCK=block)
    assert_same_bytes(got, expected(inputs(name, scale) / torch.tensor(scale)))


def test_kernels_read_bits() -> None:
    got = torch.empty(256, device=DEVICE)
    _read[(1,)](EVERY_BYTE.to(DEVICE), got, READ=BITS)
    wanted = torch.tensor([decode_byte_ref(byte) for byte in range(256)])
    torch.testing.assert_close(got.cpu(), wanted, atol=0.0, rtol=0.0, equal_nan=True)


@pytest.mark.gpu
def test_kernels_read_by_cast() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no FP8 cast below sm_89")
    got = torch.empty(256, device=DEVICE)
    _read[(1,)](EVERY_BYTE.view(FP8).to(DEVICE), got, READ=CAST)
    wanted = torch.tensor([decode_byte_ref(byte) for byte in range(256)])
    torch.testing.assert_close(got.cpu(), wanted, atol=0.0, rtol=0.0, equal_nan=True)


def test_how_pools_are_read() -> None:
    archs = ("cpu", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
    assert [pool_reading(FP8, arch) for arch in archs] == [BITS] * 3 + [CAST] * 4
    assert pool_reading(torch.bfloat16, "sm_90") == PLAIN
