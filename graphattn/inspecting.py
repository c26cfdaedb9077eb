"""What becomes of a model on this machine: captured, reported, closed again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from graphattn._capture.errors import CaptureError
from graphattn.capturing import capture
from graphattn.errors import GraphAttnError
from graphattn.footprint import predict
from graphattn.layer_nodes import layer_nodes
from graphattn.models import adapt
from graphattn.report import EngineReport
from graphattn.text import load_model


def inspect_folder(
    folder: Path, device: torch.device, *, max_batch: int, max_seq_len: int | None
) -> EngineReport:
    """The report of an engine of the model in `folder`, a transformers folder, on `device`.

    With an estimate of the memory of the graphs, which takes seconds for a model of many layers.
    Raises `GraphAttnError` for a folder without a model and for one that cannot be captured.
    """
    model = load_model(folder, device)
    try:
        with capture(model, max_batch=max_batch, max_seq_len=max_seq_len) as engine:
            estimate = predict(adapt(model), engine.config, graphs=True)
            nodes = layer_nodes(model)
            return replace(engine.report(), predicted=estimate, layer_nodes=nodes)
    except CaptureError as error:
        raise GraphAttnError(str(error)) from error
