"""docs/families.md says what a run of `profiles.families` gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from profiles.families import audited, rows, table

DOC = Path(__file__).parents[2] / "docs" / "families.md"
LINES = DOC.read_text().splitlines()
DOCUMENTED = [line for line in LINES if line.startswith("|")]

pytestmark = [
    pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a CUDA build of torch"),
    pytest.mark.skipif(
        f"transformers {transformers.__version__} and" not in DOC.read_text(),
        reason="the table names lines of another version of transformers",
    ),
]


def test_findings_of_one_family() -> None:
    assert set(rows("opt", audited("opt"))) <= set(DOCUMENTED)


@pytest.mark.slow
def test_the_table_is_what_a_run_gives() -> None:
    assert list(table()) == DOCUMENTED
