"""What two reports say differently."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Change:
    """One value that is not the same. None: one of the reports has no such value."""

    path: tuple[str, ...]  # such as ("buckets", "decode-8", "operations", "aten.mm.default")
    before: Any
    after: Any

    def __str__(self) -> str:
        numbers = all(type(value) in (int, float) for value in (self.before, self.after))
        by = f" ({self.after - self.before:+,})" if numbers else ""
        return f"{' / '.join(self.path)}: {_text(self.before)} -> {_text(self.after)}{by}"


@dataclass(frozen=True, slots=True)
class ReportDiff:
    """All that changed, in the order of the reports. `str()` gives a line for each."""

    changes: tuple[Change, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.changes)) or "no difference"

    def to_json(self) -> str:
        """A list of objects with `path`, `before` and `after`."""
        return json.dumps([asdict(change) for change in self.changes], indent=2)


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> ReportDiff:
    """Of two trees of mappings, value by value."""
    old, new = dict(_values(before)), dict(_values(after))
    return ReportDiff(
        tuple(
            Change(path, old.get(path), new.get(path))
            for path in old | new
            if old.get(path) != new.get(path)
        )
    )


def _values(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[Any, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _values(value, (*path, name))
        else:
            yield (*path, name), value


def _text(value: Any) -> str:
    return f"{value:,}" if type(value) in (int, float) else str(value)
