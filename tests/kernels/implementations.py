"""Both implementations of an op, called alike: on the CPU, and the Triton kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # cpu: the interpreter

Run = Callable[..., None]


def implementations(ops: ModuleType, kernels: Mapping[str, Run]) -> tuple[Run, Run]:
    """`run(name, *arguments)` of the ops in a module, and of the launchers of their kernels."""

    def run_cpu(op: str, *args: Any) -> None:
        getattr(ops, op)(*args)

    def run_triton(op: str, *args: Any) -> None:
        """The kernel, interpreted or on a GPU, with results copied back into the arguments."""
        moved = [x.to(DEVICE) if isinstance(x, Tensor) else x for x in args]
        kernels[op](*moved)
        for x, there in zip(args, moved, strict=True):
            if isinstance(x, Tensor) and there is not x:
                x.copy_(there)

    return run_cpu, run_triton
