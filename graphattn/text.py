"""Text in and out of the token world: loading, chat prompts, streaming lines."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graphattn.errors import GraphAttnError
from graphattn.versions import require


@dataclass(frozen=True, slots=True)
class Loaded:
    """A transformers causal LM in inference mode, and its tokenizer."""

    model: Any
    tokenizer: Any


def load_model(folder: Path, device: torch.device) -> Any:
    """Load a model, in eval mode, from a transformers folder; nothing is fetched from a network.

    For commands: transformers' progress bars and notices are off afterwards in this process.
    Raises `GraphAttnError` when the folder holds no model or transformers is missing.
    """
    _check(folder)
    from transformers import AutoModelForCausalLM

    with _named(folder):
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", local_files_only=True
        )
    return model.to(device).eval()


def model_of_config(folder: Path, dtype: torch.dtype) -> Any:
    """A model of random weights, in eval mode, as `folder`/config.json describes it; otherwise
    like `load_model`."""
    _check(folder)
    from transformers import AutoConfig, AutoModelForCausalLM

    with _named(folder):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def load(folder: Path, device: torch.device) -> Loaded:
    """`load_model`, and the tokenizer beside it."""
    model = load_model(folder, device)
    from transformers import AutoTokenizer

    with _named(folder):
        return Loaded(model, AutoTokenizer.from_pretrained(folder, local_files_only=True))


def _check(folder: Path) -> None:
    """Raise `GraphAttnError` unless `folder` has a configuration and transformers, made quiet and
    kept off the network, is there to read it."""
    if not (folder / "config.json").is_file():
        raise GraphAttnError(f"{folder} is no transformers folder: it has no config.json")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is first imported
    try:
        from transformers.utils import logging

        require("transformers")
    except ImportError as error:
        raise GraphAttnError(f"{error}: pip install 'graphattn[hf]'") from error
    logging.disable_progress_bar()
    logging.set_verbosity_error()


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise GraphAttnError(f"cannot load {folder}: {reason}") from error


def encode(tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of each prompt, as a user's message where the tokenizer has a chat template."""
    if tokenizer.chat_template is None:
        return [list(ids) for ids in tokenizer(list(prompts))["input_ids"]]
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    encoded = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)
    return [list(ids) for ids in encoded["input_ids"]]


class TextStream:
    """Text of one growing token sequence, in pieces that never end inside a character."""

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers.decoders import DecodeStream

        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` complete; bytes of an unfinished character wait."""
        pieces = (self._stream.step(self._backend, token) for token in token_ids)
        return "".join(piece for piece in pieces if piece)


class LineWriter:
    """Streams several texts at once as labelled lines, so that a log and a terminal look alike."""

    def __init__(self, label: str, width: int, write: Callable[[str], None]) -> None:
        self._label = label
        self._width = width
        self._write = write
        self._pending = ""

    def feed(self, text: str) -> None:
        """Write the lines that `text` completes, wrapped at spaces."""
        *lines, self._pending = (self._pending + text).split("\n")
        for line in lines:
            self._wrap(line, rest=False)
        self._pending = self._wrap(self._pending, rest=True)

    def close(self) -> None:
        """Write what is left."""
        if self._pending:
            self._line(self._pending)
        self._pending = ""

    def _wrap(self, line: str, *, rest: bool) -> str:
        while len(line) > self._width:
            cut = line.rfind(" ", 1, self._width + 1)
            cut = cut if cut > 0 else self._width
            self._line(line[:cut])
            line = line[cut:].lstrip(" ")
        if rest:
            return line
        if line.strip():
            self._line(line)
        return ""

    def _line(self, line: str) -> None:
        self._write(f"{self._label} {line.rstrip()}")
