"""Where a number comes from: machine, versions and commit, written beside it as JSON lines."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "profiles" / "results"
Record = dict[str, Any]
PACKAGES = ("torch", "triton", "transformers", "numpy")


def machine() -> dict[str, Any]:
    """Processor, memory and, where there is one, GPU."""
    found: dict[str, Any] = {
        "cpu": _proc("/proc/cpuinfo", "model name"),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory": _proc("/proc/meminfo", "MemTotal"),
        "gpu": None,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = f"{properties.name}, {properties.multi_processor_count} SMs"
    return found


def versions() -> dict[str, str | None]:
    """Of Python and the packages that numbers depend on; None for one that is missing."""
    return {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def commit() -> str | None:
    """Of the checkout, with a + when files differ from it; None outside a git checkout."""
    try:
        git = ["git", "-C", str(ROOT)]
        head = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
        dirty = subprocess.check_output([*git, "status", "--porcelain", "-uno"], text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if dirty else "")


def context() -> dict[str, Any]:
    """What every record of one run shares."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
    }


def check(record: Record) -> None:
    """Raise `ValueError` unless the record means what its fields say everywhere: see the docstring
    of `profiles.benchmarks`."""
    spreads = {name: value for name, value in record.items() if _is_spread(value)}
    unnamed = [name for name in spreads if not name.endswith("_s")]
    shares = {"stages", "of_copy", "of_matmul", "of_bound"}
    if unnamed:
        raise ValueError(f"times in seconds have names that end with _s: {unnamed}")
    if ("ours_s" in record) != ("roofline" in record):
        raise ValueError(f"a step's time and its roofline go together: {sorted(record)}")
    if "roofline" in record and set(record["roofline"]) != shares:
        raise ValueError(f"roofline has {sorted(record['roofline'])}, wanted {sorted(shares)}")
    if any(name.startswith("theirs_") for name in record) and "ratio" not in record:
        raise ValueError(f"what stands beside something has a ratio: {sorted(record)}")


def _is_spread(value: object) -> bool:
    return isinstance(value, dict) and "median" in value


def append(path: Path, shared: dict[str, Any], records: Sequence[Record]) -> None:
    """Add one line per record to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for record in records:
            file.write(json.dumps(shared | record) + "\n")


def latest(results: Path, benchmark: str) -> list[Record]:
    """Records of the last run of a benchmark in a folder of results; empty without one."""
    path = results / f"{benchmark}.jsonl"
    if not path.exists():
        return []
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [record for record in records if record["time"] == records[-1]["time"]]


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Median with the quartiles around it, and the number of samples."""
    low, middle, high = statistics.quantiles(samples, n=4)
    return {"median": middle, "q1": low, "q3": high, "n": len(samples)}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _proc(path: str, field: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), None)
