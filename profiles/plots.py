"""`python -m profiles.plots`: the figures of docs/benchmarks.md, from the last run of each kind.

Each is written as SVG and PNG beside the records. Bands are quartiles.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator, ScalarFormatter

from profiles.record import RESULTS, Record, latest

OURS, THEIRS, LEAST, *OTHERS = "#1f6f8b", "#d1495b", "#8d8d8d", "#e8a33d", "#66a182", "#7a5195"
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
    "svg.hashsalt": "graphattn",  # the same records give the same file
    "svg.fonttype": "none",
}


def batch(records: Sequence[Record]) -> Figure:
    """Step time against batch."""
    figure, axes = _figure("SmolLM2-135M, fp32: decode step against batch")
    _beside_generate(axes, records, "batch")
    return _finish(figure, axes, "rows of the batch", [r["batch"] for r in records])


def length(records: Sequence[Record]) -> Figure:
    """Step time against context length."""
    rows = records[0]["batch"]
    figure, axes = _figure(f"SmolLM2-135M, fp32, batch {rows}: decode step against context")
    _beside_generate(axes, records, "length")
    return _finish(
        figure, axes, "tokens in the context of each row", [r["length"] for r in records]
    )


def bound(records: Sequence[Record]) -> Figure:
    """Step time against max_seq_len, the lengths being equal."""
    rows = records[0]["batch"]
    figure, axes = _figure(f"SmolLM2-135M, fp32, batch {rows}: the same requests under each bound")
    _band(axes, records, "max_seq_len", "ours_s", OURS, "graphattn")
    _least(axes, records, "max_seq_len")
    return _finish(figure, axes, "max_seq_len", [r["max_seq_len"] for r in records])


def drafts(records: Sequence[Record]) -> Figure:
    """Step time and speed against the number of drafts, both over plain decoding's."""
    figure = Figure(figsize=(7.4, 3.2), layout="constrained")
    cost, speed = figure.subplots(1, 2)
    series = {
        "greedy": ("held-out", OURS),
        "temperature 0.7": ("held-out, sampled", THEIRS),
    }
    ks = sorted({r["k"] for r in records if r["drafter"] == "MTP"})
    figure.suptitle("MTP(k), miniature, batch 8, held-out text", fontsize=9, x=0.01, ha="left")
    for axes, field, title in (
        (cost, "step_cost", "step time / plain step"),
        (speed, "ratio", "tokens per second / plain"),
    ):
        for label, (text, color) in series.items():
            rows = sorted((r["k"], r[field]) for r in records if r["text"] == text)
            x, y = zip((0, 1.0), *rows, strict=True)
            axes.plot(x, y, marker="o", color=color, label=label)
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_xlabel("k, drafts per row")
        axes.set_xticks([0, *ks])
        axes.axhline(1.0, color=LEAST, linestyle="--", linewidth=1)
        _from_zero(axes)
    figure.legend(*cost.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def ranks(records: Sequence[Record]) -> Figure:
    """Step time against the number of DCP ranks, all in one process."""
    steps = [r for r in records if r["part"] == "step"]
    figure, axes = _figure(
        "Tiny model, batch 8: decode step against W, virtual ranks in one process"
    )
    for reduce, color in (("ag_rs", OURS), ("a2a", THEIRS)):
        _band(axes, [r for r in steps if r["reduce"] == reduce], "W", "ours_s", color, reduce)
    return _finish(figure, axes, "W, DCP ranks", sorted({r["W"] for r in steps}))


def peers(records: Sequence[Record]) -> Figure:
    """Attention alone against length, beside others that were there."""
    rows = records[0]["batch"]
    figure, axes = _figure(f"Attention of a layer (9 query, 3 KV heads of 64), fp32, batch {rows}")
    timed = [r for r in records if "ours_s" in r]
    names = dict.fromkeys(r["peer"] for r in timed)
    for name, color in zip(names, (OURS, THEIRS, *OTHERS), strict=False):
        full = [r for r in timed if r["peer"] == name and r["length"] == r["max_seq_len"]]
        _band(axes, full, "length", "ours_s", color, name)
        for r in timed:
            if r["peer"] == name and r["length"] < r["max_seq_len"]:
                axes.plot(r["length"], _ms(r["ours_s"]["median"]), "x", color=color, markersize=8)
    largest = max(r["max_seq_len"] for r in timed)
    axes.plot([], [], "x", color="#555555", label=f"with max_seq_len {largest}")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    lengths = sorted({r["length"] for r in timed})
    return _finish(figure, axes, "tokens of each row", lengths, zero=False)


FIGURES: dict[str, tuple[str, Callable[[Sequence[Record]], Figure]]] = {
    "step-batch": ("batches", batch),
    "step-length": ("lengths", length),
    "step-bound": ("bounds", bound),
    "step-drafts": ("speculation", drafts),
    "step-ranks": ("dcp", ranks),
    "attention-peers": ("peers", peers),
}


def draw(results: Path, out: Path) -> list[Path]:
    """Write every figure whose benchmark has records in `results`; returns the files."""
    written = []
    with matplotlib.rc_context(STYLE):
        for name, (benchmark, make) in FIGURES.items():
            if not (records := latest(results, benchmark)):
                continue
            figure = make(records)
            for suffix in ("svg", "png"):
                path = out / f"{name}.{suffix}"
                no_date = {"Date": None} if suffix == "svg" else {"Software": None}
                figure.savefig(path, dpi=130, metadata=no_date)
                written.append(path)
    return written


def _figure(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.0, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize=9, loc="left")
    return figure, axes


def _beside_generate(axes: Axes, records: Sequence[Record], x: str) -> None:
    _band(axes, records, x, "theirs_s", THEIRS, "transformers generate")
    _band(axes, records, x, "ours_s", OURS, "graphattn")
    _least(axes, records, x)


def _band(
    axes: Axes, records: Sequence[Record], x: str, field: str, color: str, label: str
) -> None:
    """Medians, and quartiles around them."""
    at = [r[x] for r in records]
    low, middle, high = ([_ms(r[field][key]) for r in records] for key in ("q1", "median", "q3"))
    axes.plot(at, middle, marker="o", markersize=4, color=color, label=label)
    axes.fill_between(at, low, high, color=color, alpha=0.18, linewidth=0)


def _least(axes: Axes, records: Sequence[Record], x: str) -> None:
    """What the machine's copy bandwidth and matmul rate allow."""
    least = [_ms(r["roofline"]["of_bound"] * r["ours_s"]["median"]) for r in records]
    axes.plot([r[x] for r in records], least, "--", color=LEAST, label="roofline of this machine")


def _finish(
    figure: Figure, axes: Axes, xlabel: str, ticks: Sequence[int], *, zero: bool = True
) -> Figure:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel(xlabel)
    axes.set_ylabel("milliseconds")
    if zero:
        _from_zero(axes)
    axes.legend(loc="upper left")
    return figure


def _ms(seconds: float) -> float:
    return 1e3 * seconds


def _from_zero(axes: Axes) -> None:
    """With room for the legend above the highest point."""
    axes.set_ylim(0, axes.dataLim.y1 * 1.4)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m profiles.plots", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the records")
    parser.add_argument("--out", type=Path, help="folder of the figures; default: the same")
    arguments = parser.parse_args(argv)
    for path in draw(arguments.results, arguments.out or arguments.results):
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
