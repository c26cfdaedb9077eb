"""Without a GPU the whole test process runs Triton's interpreter; compilation tests use workers of
their own, since one process is in one mode."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported

torch.set_num_threads(int(os.environ.get("GRAPHATTN_TEST_THREADS", "1")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
