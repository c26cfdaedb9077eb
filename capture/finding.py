"""One thing that a CUDA graph cannot hold, and the comment by which its line allows it."""

from __future__ import annotations

import linecache
import re
from dataclasses import dataclass

_ALLOWANCE = re.compile(r"#\s*graphattn:\s*allow\s+(?P<category>[^:]+?)\s*:\s*(?P<reason>\S.*)")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a CUDA graph cannot hold, at a line of the caller's code."""

    category: str
    operation: str
    file: str
    line: int
    source: str
    reason: str
    fix: str

    @property
    def head(self) -> str:
        """Where and what, in one line."""
        return f"{self.file}:{self.line}: {self.category}: {self.source}"

    def __str__(self) -> str:
        return f"{self.head}\n    {self.operation} {self.reason}\n    fix: {self.fix}"


def allowance(finding: Finding) -> str | None:
    """The reason that its line, or the line above it, gives for allowing the finding."""
    for line in (finding.line, finding.line - 1):
        match = _ALLOWANCE.search(linecache.getline(finding.file, line))
        if match and match["category"] == finding.category:
            return match["reason"].strip()
    return None
