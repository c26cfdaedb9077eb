"""Configuration files: config.json of a transformers folder, or one that is shipped by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphattn.errors import wrong

SHIPPED = {path.stem: path for path in (Path(__file__).parent / "configs").glob("*.json")}


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The content of one, and its name for messages."""

    name: str
    values: dict[str, Any]

    def count(self, *keys: str, default: int | None = None) -> int:
        """The first of `keys` that is there, a non-negative integer."""
        found = next((self.values[key] for key in keys if self.values.get(key) is not None), None)
        value = default if found is None else found
        if not isinstance(value, int) or value < 0:
            raise self.wrong(keys[0], "a non-negative integer", value)
        return value

    def size(self, *keys: str, default: int | None = None) -> int:
        """As `count`, at least 1."""
        if (value := self.count(*keys, default=default)) < 1:
            raise self.wrong(keys[0], "an integer >= 1", value)
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        """`default` when it is not there."""
        return bool(self.values.get(key, default))

    def wrong(self, key: str, wanted: str, got: object) -> Exception:
        """The error of one key."""
        fix = f"The planner counts from {self.name}; name another --model."
        return wrong(f"model: {key}", wanted, got, fix)


def read_config(model: str) -> ConfigFile:
    """Of a shipped name or a folder with config.json."""
    path = SHIPPED.get(model, Path(model) / "config.json")
    try:
        values = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        names = ", ".join(sorted(SHIPPED))
        fix = f"Say a folder with a readable config.json ({type(error).__name__})."
        raise wrong("--model", f"{names}, or a transformers folder", model, fix) from None
    if not isinstance(values, dict):
        raise wrong("--model", "a JSON object in config.json", type(values).__name__, "Mend it.")
    return ConfigFile(model, values)
