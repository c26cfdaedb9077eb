"""Runs a program under an NVTX listener built for the test, and what the listener heard."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "capture" / "nvtx_listener.c"


@dataclass(frozen=True)
class Heard:
    """Lines "push DOMAIN NAME", "pop DOMAIN" and "mark DOMAIN NAME VALUE", in order."""

    lines: list[str]
    printed: str  # by the program

    def paths(self) -> list[str]:
        """Of the ranges, "outer/inner", in the order in which they were opened."""
        paths, names = [], []
        for line in self.lines:
            kind, _, *rest = line.split()
            if kind == "push":
                names.append(rest[0])
                paths.append("/".join(names))
            elif kind == "pop":
                names.pop()
        assert not names, f"never closed: {names}"
        return paths

    def values(self, counter: str) -> list[int]:
        """What a counter was, in order."""
        marks = [line.split() for line in self.lines if line.startswith("mark ")]
        return [int(value) for _, _, name, value in marks if name == counter]


def hear(program: str, folder: Path) -> Heard:
    """Run `program` in a process of its own. Skips the test only where no C compiler exists."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler to build the NVTX listener with: install gcc, or set CC")
    library, log = folder / "listener.so", folder / "log"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, SOURCE], check=True)
    environment = os.environ | {"NVTX_INJECTION64_PATH": str(library), "NVTX_TEST_LOG": str(log)}
    command = [sys.executable, "-c", program]
    printed = subprocess.check_output(command, env=environment, text=True)
    return Heard(log.read_text().splitlines(), printed)
