"""Packages that are too old are refused by name, before anything of them is missing."""

import subprocess
import sys

import pytest

from graphattn import versions


@pytest.mark.parametrize(
    ("found", "refused"),
    [
        *(("2.10.2", True), ("1.13.0+cpu", True), (None, False)),
        *(("2.11.0", False), ("2.14.1+cu130", False), ("2.11.0a0+git3f", False), ("3.0", False)),
    ],
)
def test_the_oldest_version(
    found: str | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "_installed", lambda package: found)
    if not refused:
        versions.require("torch")
        return
    message = f"graphattn needs torch 2.11 or newer, found {found}".replace("+", r"\+")
    with pytest.raises(ImportError, match=message):
        versions.require("torch")


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_importing_graphattn_names_what_is_too_old(package: str) -> None:
    """Before anything of torch is imported."""
    script = f"""
import importlib.metadata, sys
real = importlib.metadata.version
importlib.metadata.version = lambda name: "1.9" if name == "{package}" else real(name)
try:
    import graphattn
except ImportError as error:
    assert "graphattn needs {package}" in str(error) and "pip install" in str(error), error
    assert "torch" not in sys.modules
else:
    raise SystemExit("nothing was said")
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_transformers_model_needs_a_transformers_that_is_new_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from graphattn import capture
    from tests.tiny_llama import tiny_llama

    model = tiny_llama()
    monkeypatch.setattr(versions, "_installed", lambda package: "4.57.1")
    with pytest.raises(ImportError, match=r"graphattn needs transformers 5.24 or newer"):
        capture(model, 1)
