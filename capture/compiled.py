"""Functions of torch.compile inside a program.

    cuda     warmed until they are compiled, then captured as the kernels that they launch
    host     recorded as the plain operations of their source: generated code is none that a
             recorder can see
    eager    run as they are
    audit    looked at as the plain operations of their source

A function that makes CUDA graphs of its own ("reduce-overhead", "max-autotune") is refused: a graph
cannot be captured inside the capture of another, and its outputs lie in memory that its next
call takes back.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import nn

REASON = (
    "is compiled to make CUDA graphs of its own (mode 'reduce-overhead' or 'max-autotune', or the "
    "option triton.cudagraphs), which cannot be captured in another. Compile it with "
    "mode='max-autotune-no-cudagraphs'."
)


def plain() -> AbstractContextManager[Any]:
    """Compiled functions run the source that they were made of."""
    return _stance("force_eager")


def compiled_already() -> AbstractContextManager[Any]:
    """Compiled functions refuse to compile again: a capture runs what the warm-up has compiled."""
    return _stance("fail_on_recompile")


def variants(count: int) -> AbstractContextManager[Any]:
    """Functions may be compiled for `count` more shapes; beyond its limit torch runs them plainly,
    and nobody notices."""
    if not _loaded():
        return nullcontext()
    config = torch._dynamo.config
    patched: AbstractContextManager[Any] = config.patch(
        recompile_limit=config.recompile_limit + count
    )
    return patched


def uncompiled(model: Any) -> Any:
    """The module inside what `torch.compile(module)` has returned; anything else as it is."""
    return model._orig_mod if _context(model) and isinstance(model, nn.Module) else model


def compiler_of(model: Any) -> Any:
    """What compiles calls of a module as `torch.compile(module)` or `module.compile()` asked for:
    a function of a callable, or None."""
    if (context := _context(model)) is None and isinstance(model, nn.Module):
        context = _context(model._compiled_call_impl)
    return context


def graphs_of_its_own(fn: Any) -> str | None:
    """Name of the part of `fn` that is compiled to make CUDA graphs, or None.

    Parts of a module are its modules and the functions that are their attributes.
    """
    for name, part in _parts(fn):
        context = compiler_of(part)
        if context is not None and _makes_graphs(context):
            return name
    return None


def _parts(fn: Any) -> Iterator[tuple[str, Any]]:
    yield type(fn).__name__ if isinstance(fn, nn.Module) else getattr(fn, "__name__", str(fn)), fn
    for path, module in fn.named_modules() if isinstance(fn, nn.Module) else ():
        yield path or type(fn).__name__, module
        for name, value in vars(module).items():
            if callable(value) and name != "_compiled_call_impl":
                yield f"{path}.{name}" if path else name, value


def _context(fn: Any) -> Any:
    """Of torch.compile, which wraps a module in a module and a function in a function."""
    if not _loaded() or fn is None:
        return None
    from torch._dynamo.eval_frame import OptimizeContext, OptimizedModule

    if isinstance(fn, OptimizedModule):
        return fn.dynamo_ctx
    if not hasattr(fn, "_torchdynamo_orig_callable"):
        return None
    cells = [cell.cell_contents for cell in getattr(fn, "__closure__", None) or ()]
    return next((c for c in cells if isinstance(c, OptimizeContext)), None)


def _makes_graphs(context: Any) -> bool:
    config = context.compiler_config or {}
    backend = context.callback
    while hasattr(backend, "_torchdynamo_orig_backend"):
        if getattr(backend, "__name__", None) == "cudagraphs":
            return True
        backend = backend._torchdynamo_orig_backend
    return bool(config.get("triton.cudagraphs"))


def _stance(stance: Literal["force_eager", "fail_on_recompile"]) -> AbstractContextManager[Any]:
    if not _loaded():
        return nullcontext()
    entered: AbstractContextManager[Any] = torch.compiler.set_stance(stance)
    return entered


def _loaded() -> bool:
    """Nothing is compiled in a process that has not loaded the compiler."""
    return "torch._dynamo" in sys.modules
