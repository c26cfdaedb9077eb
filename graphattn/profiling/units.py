"""Nanoseconds as people read them."""

from __future__ import annotations


def time_text(ns: float) -> str:
    """With three digits and a unit from ns to s."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if abs(ns) >= size:
            value = ns / size
            digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
            return f"{value:.{digits}f} {unit}"
    return f"{ns:.0f} ns"
