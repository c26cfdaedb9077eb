"""Strides as kernels take them: in units whose size the compiler knows.

Integer arguments are never specialized (a value of 1 or a multiple of 16 would compile another
variant, perhaps inside a capture), so the compiler would assume nothing of a stride and give up
vector loads. A stride passed as a multiple of a constexpr unit tells it the alignment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable


def stride_unit(strides: Iterable[int]) -> int:
    """Largest of 1, 2, 4, 8, 16 that divides every stride, in elements."""
    return math.gcd(16, *strides)
