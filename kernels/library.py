"""How a torch op of this package is defined: it only mutates, on the CPU and in CUDA memory."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

NAMESPACE = "graphattn"

_library = torch.library.Library(NAMESPACE, "DEF")


def define(name: str, schema: str) -> Any:
    """Define one op that only mutates, with its lazily imported implementations."""
    _library.define(f"{name}({schema}) -> ()")
    _library.impl(name, _lazy(name, f"{name}_cpu"), "CPU")
    _library.impl(name, _lazy(name, name), "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", lambda *args: None, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _lazy(name: str, module: str) -> Callable[..., None]:
    """Forward to function `name` of a sibling module, imported at the first call."""
    target: Callable[..., None] | None = None

    def call(*args: Any) -> None:
        nonlocal target
        if target is None:
            target = getattr(import_module(f".{module}", __package__), name)
        target(*args)

    return call
