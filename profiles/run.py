"""`python -m profiles.run [NAME...]`: benchmarks by name; without names, those of the README.

Prints the records of each benchmark and appends them, with machine, versions and commit, to a file
of its name. Nothing of a benchmark is printed or kept when one of its checks is red, as when a
single token differs; the others still run, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from profiles.benchmarks import BENCHMARKS, README
from profiles.record import RESULTS, Record, append, check, context
from profiles.setting import Refused, Setting


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m profiles.run", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="see --list; or all of them: all")
    parser.add_argument("--list", action="store_true", help="the benchmarks, and what they measure")
    parser.add_argument("--dry", action="store_true", help="tiny models, seconds; not for results/")
    parser.add_argument("--out", type=Path, help="folder of the records; default profiles/results")
    parser.add_argument("--no-record", action="store_true", help="print only")
    arguments = parser.parse_args(argv)
    if arguments.list:
        print(listing())
        return 0
    names = list(BENCHMARKS) if arguments.names == ["all"] else arguments.names or list(README)
    if unknown := sorted(set(names) - set(BENCHMARKS)):
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    out: Path | None = arguments.out or (None if arguments.dry else RESULTS)
    red = run(Setting(dry=arguments.dry), names, None if arguments.no_record else out)
    if red:
        print(f"refused: {', '.join(red)}", file=sys.stderr)
    return 1 if red else 0


def run(setting: Setting, names: Sequence[str], out: Path | None) -> list[str]:
    """Measure, print, and append to files in `out`; returns the names whose checks were red."""
    shared = context() | {"peaks": asdict(setting.peaks)}
    print(f"machine: {shared['machine']}\nversions: {shared['versions']}\npeaks: {peaks(setting)}")
    red = []
    for name in names:
        started = time.monotonic()
        try:
            records = list(BENCHMARKS[name].measure(setting))
        except Refused as refusal:
            print(f"\n{name}: refused: {refusal}", file=sys.stderr, flush=True)
            red.append(name)
            continue
        print(f"\n{name}, {time.monotonic() - started:.0f} s")
        for record in records:
            check(record)
            print(f"  {line(record)}", flush=True)
        if out is not None:
            append(out / f"{name}.jsonl", shared | {"benchmark": name}, records)
    return red


def listing() -> str:
    """A line per benchmark; a star for those of the README."""
    lines = []
    for name, module in BENCHMARKS.items():
        about = (module.__doc__ or "").splitlines()[0]
        lines.append(f"{'*' if name in README else ' '} {name:12} {about}")
    return "\n".join([*lines, "* run without a name: the numbers of the README"])


def peaks(setting: Setting) -> str:
    """In one line."""
    found = setting.peaks
    return (
        f"copy {found.copy_bytes_per_s / 1e9:.1f} GB/s, "
        f"{found.dtype} products {found.matmul_ops_per_s / 1e9:.0f} GFLOP/s"
    )


def line(record: Record) -> str:
    """Fields in their order, times in milliseconds with their quartiles."""
    return ", ".join(f"{name.removesuffix('_s')} {_text(v)}" for name, v in record.items())


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if not isinstance(value, dict):
        return str(value)
    if "median" in value:
        low, middle, high = (1e3 * value[key] for key in ("q1", "median", "q3"))
        return f"{middle:.4g} ms ({low:.4g} to {high:.4g})"
    shares = {k: f"{100 * v:.3g} %" for k, v in value.items() if k.startswith("of_")}
    return " ".join(f"{k} {v}" for k, v in (shares or value).items())


if __name__ == "__main__":
    raise SystemExit(main())
