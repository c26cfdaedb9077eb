"""Oracle of float8_e4m3fn: the format from its definition, one value at a time, in float64.

A byte is a sign, 4 exponent bits (bias 7) and 3 mantissa bits; exponent 0 holds the subnormals,
multiples of 2**-9. All ones but the sign is NaN. There is no infinity; the largest value is 448.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

MAX_FP8 = 448.0
NAN_BYTE = 0x7F


def decode_byte_ref(byte: int) -> float:
    """The value of a byte."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = byte >> 3 & 0xF, byte & 0x7
    if byte & 0x7F == NAN_BYTE:
        return math.copysign(math.nan, sign)
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def encode_byte_ref(value: float) -> int:
    """The byte of the nearest value, of the even one of two; +-448 beyond; NaN stays NaN."""
    sign = 0x80 if math.copysign(1.0, value) < 0 else 0
    magnitude = abs(value)
    if math.isnan(value):
        return sign | NAN_BYTE
    if magnitude >= MAX_FP8:
        return sign | (NAN_BYTE - 1)
    exponent = -6  # of the subnormals; else of the largest power of two not above the value
    if magnitude >= 2.0**exponent:
        exponent = math.frexp(magnitude)[1] - 1
    ulps = round(magnitude / 2.0 ** (exponent - 3))  # of the place's spacing; exact, ties to even
    return sign | ((exponent + 6) * 8 + ulps)  # 16 ulps carry into the exponent


def quantise_ref(values: Tensor, scale: Tensor) -> Tensor:
    """Bytes (uint8) of fp8(values / scale); `scale` fp32, broadcast against `values`."""
    quotients = values.cpu().float() / scale.cpu()  # one rounding to fp32, as `ops` has it
    bytes_ = [encode_byte_ref(x) for x in quotients.flatten().tolist()]
    return torch.tensor(bytes_, dtype=torch.uint8).view(values.shape)


def dequantise_ref(pool: Tensor, scale: Tensor) -> Tensor:
    """What a pool of FP8 entries holds, times `scale`: float64."""
    table = torch.tensor(_table(range(256)), dtype=torch.float64)
    return table[pool.cpu().view(torch.uint8).long()] * scale.cpu().double()


def _table(numbers: Iterable[int]) -> list[float]:
    return [decode_byte_ref(byte) for byte in numbers]
