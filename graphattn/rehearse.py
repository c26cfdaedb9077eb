"""The step of a model on a fake GPU, from its configuration alone: no weights, no driver.

What would break a capture there is found here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from graphattn.checkup import audit_programs
from graphattn.errors import GraphAttnError
from graphattn.models import adapt
from graphattn.models.contract import StepModel
from graphattn.sizing import Options, open_memory, resolve
from graphattn.step import step_program
from graphattn.text import model_of_config

if TYPE_CHECKING:
    from graphattn._capture.audit import AuditReport

# Small, and with every kind of step: shapes decide nothing about what a step does.
REHEARSAL = Options(
    max_batch=4,
    max_seq_len=None,
    max_tokens=64,
    page_size=16,
    num_pages=16,
    memory_budget=None,
    buckets=None,
    backend="eager",
    run_ahead=1,
    max_queue=4,
    dcp=None,
    speculate=None,
    prefix_reuse=False,
    prepack=False,
)


def audit_folder(folder: Path, dtype: torch.dtype) -> AuditReport:
    """Audit the whole decode and mixed step of the model that `folder`/config.json describes.

    Raises `GraphAttnError` for a folder without one, `UnsupportedModelError` for a model that
    cannot be served.
    """
    from graphattn._capture.audit import fake_cuda

    with fake_cuda():
        return audit_model(adapt(model_of_config(folder, dtype)))


def audit_model(model: StepModel) -> AuditReport:
    """The same for a model; where it lies on a fake device, that device is active."""
    config = resolve(REHEARSAL, model)
    memory, drafter = open_memory(model, config, None)
    programs = {b: step_program(model, memory, b, drafter) for b in config.buckets}
    return audit_programs(programs, config.buckets)


def named_callable(name: str) -> Callable[..., Any]:
    """`module:callable`, imported with the current folder on the path, or a `GraphAttnError`."""
    module, _, path = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise GraphAttnError(f"{name}: cannot be imported: {error}") from error
    finally:
        sys.path.pop(0)
    if not callable(found):
        raise GraphAttnError(f"{name}: wanted a callable, got {type(found).__name__}")
    return found  # type: ignore[no-any-return]
