"""What the pages promise is there: their code runs and their links lead somewhere."""

import re
from pathlib import Path

import pytest

from tests.tiny_llama import save_tiny_llama

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def test_the_lines_under_use_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    exec(compile(code, "README.md", "exec"), {"folder": save_tiny_llama(tmp_path)})
    assert capsys.readouterr().out.startswith("[")


def test_the_blocks_of_own_engine_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    """As somebody would type them, one after the other."""
    page = ROOT / "docs" / "own-engine.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    assert len(blocks) >= 8
    names: dict[str, object] = {}
    for i, block in enumerate(blocks):
        exec(compile(block, f"{page.name}, block {i}", "exec"), names)
    out = capsys.readouterr().out
    assert "audit: nothing that a CUDA graph cannot hold" in out
    assert "verify: replay equals eager bit for bit" in out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    named = re.findall(
        r"`((?:graphattn|kernels|capture|profiles|tests|docs|examples)/[\w./]+)`", text
    )
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [file for file in named if not (ROOT / file).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_targets_exist(page: Path) -> None:
    """Every `make x` that a page names is a target."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:`|^)make ([\w-]+)", page.read_text(), re.M)) <= targets
