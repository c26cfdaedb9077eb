"""What becomes of a model on this machine: captured, reported, closed again."""

from __future__ import annotations

from pathlib import Path

import torch

from graphattn.capturing import capture
from graphattn.report import EngineReport
from graphattn.text import load_model


def inspect_folder(
    folder: Path, device: torch.device, *, max_batch: int, max_seq_len: int | None
) -> EngineReport:
    """The report of an engine of the model in `folder`, a transformers folder, on `device`.

    Raises `GraphAttnError` for a folder without a model, and what `capture` raises.
    """
    model = load_model(folder, device)
    with capture(model, max_batch=max_batch, max_seq_len=max_seq_len) as engine:
        return engine.report()
