"""Where in the caller's code an operation was called."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from dataclasses import dataclass
from types import FrameType

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(__file__) + os.sep
_PYTHON = sysconfig.get_paths()["stdlib"] + os.sep  # installed packages lie below it too


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the caller's code."""

    file: str
    line: int
    function: str

    @property
    def source(self) -> str:
        """Text of the line, stripped; empty when the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}: {self.source}"


def is_library(file: str) -> bool:
    """Whether the file belongs to torch, to this folder or to Python itself."""
    if file.startswith(_PYTHON):
        return "-packages" not in file or file.startswith(_TORCH)
    return file.startswith((_TORCH, _HERE))


def user_place() -> Place:
    """Innermost line on the stack that belongs to the caller or a package of theirs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not is_library(code.co_filename):
            return Place(code.co_filename, frame.f_lineno, code.co_qualname)
        frame = frame.f_back
    return Place("<unknown>", 0, "<unknown>")


def user_line() -> str:
    """`user_place`, in words."""
    return str(user_place())


def called_by_library() -> bool:
    """Whether the code that called a torch function is no code of the caller's.

    Looks past the frames of the override machinery and of the function itself.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith(_MACHINERY):
        frame = frame.f_back
    return frame is not None and is_library(frame.f_code.co_filename)


_MACHINERY = (os.path.join("torch", "overrides.py"), os.path.join("torch", "_tensor.py"))
