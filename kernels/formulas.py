"""Names of the formulas that `fused_ops` knows, and the error for any other."""

from __future__ import annotations

from collections.abc import Sequence

STYLES = ("rounded", "wide", "offset")  # of a norm
ACTIVATIONS = ("silu", "gelu_tanh")


def check_formula(argument: str, name: str, known: Sequence[str]) -> None:
    """Raise `ValueError` that names the argument unless `name` is among `known`."""
    if name not in known:
        raise ValueError(f"{argument}: wanted one of {', '.join(known)}, got {name!r}")
