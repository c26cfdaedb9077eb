"""A profile from a file, whatever recorded it."""

from __future__ import annotations

from pathlib import Path

from graphattn.errors import wrong
from graphattn.profiling import nsys, torch_trace
from graphattn.profiling.events import Profile
from graphattn.profiling.tables import RECORD

SQLITE = b"SQLite format 3\x00"
TEXTUAL = (b"{", b"\x1f\x8b")  # JSON, gzip


def read_profile(path: Path) -> Profile:
    """Raises `ConfigError` for what is neither an sqlite export of nsys nor a torch trace."""
    if not path.is_file():
        raise wrong("FILE", "an existing file", path, RECORD)
    with path.open("rb") as file:
        head = file.read(64).lstrip()
    if head.startswith(SQLITE):
        return nsys.read_nsys(path)
    if head.startswith(TEXTUAL):
        return torch_trace.read_torch_trace(path)
    what = "empty" if not head else f"{path.suffix or 'a file'} that begins with {head[:16]!r}"
    fix = RECORD
    if path.suffix == ".nsys-rep":
        fix = f"Export it: nsys export --type sqlite {path}"
    raise wrong("FILE", "an sqlite export of nsys or a trace of torch.profiler", what, fix)
