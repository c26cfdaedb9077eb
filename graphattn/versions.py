"""The oldest versions of other packages that graphattn runs with; older ones are refused early."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

OLDEST = {"torch": (2, 11), "triton": (3, 6), "transformers": (5, 24)}


def require(*packages: str) -> None:
    """Raise `ImportError` for a package that is installed and too old.

    Without it the reader would meet an attribute that is missing, in the middle of a capture.
    """
    for package in packages:
        found, oldest = _installed(package), OLDEST[package]
        if found is not None and tuple(map(int, re.findall(r"\d+", found)[:2])) < oldest:
            wanted = ".".join(map(str, oldest))
            raise ImportError(
                f"graphattn needs {package} {wanted} or newer, found {found}. "
                f"Run: pip install --upgrade '{package}>={wanted}'"
            )


def _installed(package: str) -> str | None:
    """From the package's metadata: importing it costs seconds, or fails when it is too old."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


require("torch", "triton")
