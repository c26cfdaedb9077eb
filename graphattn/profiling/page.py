"""One self-contained HTML page: figures, findings, bars by stage and layer, idle time, tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from graphattn.profiling.events import Profile
from graphattn.profiling.places import STAGES
from graphattn.profiling.replays import Replay
from graphattn.profiling.report import REST, TOP, ProfileReport
from graphattn.profiling.shares import UNATTRIBUTED
from graphattn.profiling.timeline import BUSY, IDLE, LAUNCH, SYNC, WAIT, gap_chart, timeline
from graphattn.profiling.units import time_text

PALETTE = ("#2f6f9f", "#59a14f", "#edc948", "#b07aa1", "#f28e2b", "#76b7b2", "#9c755f", "#bab0ac")
GREY = "#9a9a9a"
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; margin: 24px auto; width: 1180px; }
h1 { font-size: 24px; margin: 0 0 4px; }
h2 { font-size: 18px; margin: 30px 0 8px; }
p { margin: 4px 0 10px; }
.quiet { color: #666; }
.figures { display: flex; gap: 14px; margin: 16px 0 8px; }
.figure { border: 1px solid #ddd; border-radius: 6px; padding: 8px 14px; flex: 1; }
.figure b { display: block; font-size: 21px; }
.finding { border-left: 4px solid #d9534f; background: #fbf1f0; padding: 8px 12px; margin: 8px 0; }
.good { border-left-color: #59a14f; background: #f1f7ef; }
.bar { display: flex; height: 22px; background: #f0f0f0; }
.bar span { display: block; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: 3px 10px; text-align: right; border-bottom: 1px solid #eee; }
th { color: #666; font-weight: 600; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
table.bars td:first-child { width: 200px; }
td.wide { width: 700px; }
td.name { max-width: 520px; overflow: hidden; text-overflow: ellipsis; white-space: nowrap;
  font-family: ui-monospace, monospace; font-size: 13px; }
.key { display: inline-block; margin-right: 16px; }
.key i { display: inline-block; width: 12px; height: 12px; margin-right: 5px; }
svg text { font-size: 13px; fill: #444; }
svg .axis { font-size: 12px; fill: #777; }
svg .end { text-anchor: end; }
svg .inside { text-anchor: middle; fill: #fff; font-size: 12px; }
"""


def page(report: ProfileReport, profile: Profile, replays: Sequence[Replay]) -> str:
    """The page; it loads nothing from anywhere."""
    body = [
        f"<h1>Profile of replayed graphs</h1><p class='quiet'>recorded by {escape(report.source)}"
        f"</p>{_figures(report, replays)}",
        f"<h2>Findings</h2>{_findings(report)}",
    ]
    if report.shares:
        body += [
            f"<h2>GPU time by stage</h2>{_stages(report)}",
            f"<h2>GPU time by layer</h2>{_layers(report)}",
        ]
    body += [f"<h2>Idle time between replays</h2>{_idle(report, profile, replays)}"]
    body += [f"<h2>Buckets</h2>{_buckets(report)}"]
    if report.shares:
        body += [f"<h2>Kernels</h2>{_kernels(report)}"]
    if report.counters:
        body += [f"<h2>Counters</h2>{_counters(report)}"]
    if report.notes:
        notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
        body += [f"<h2>Notes</h2><ul>{notes}</ul>"]
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f"<title>Profile of replayed graphs</title><style>{STYLE}</style></head>\n"
        f"<body>\n{chr(10).join(body)}\n</body></html>\n"
    )


def _figures(report: ProfileReport, replays: Sequence[Replay]) -> str:
    busy = sum(replay.busy for replay in replays)
    idle = sum(gap.idle for gap in report.gaps)
    known = report.total - report.stages().get(UNATTRIBUTED, 0)
    figures = [
        (str(len(replays)), "replays"),
        (time_text(report.loop), "from the first launch to the last end"),
        (f"{time_text(busy)} ({busy / report.loop:.0%})", "replayed nodes ran"),
        (f"{time_text(idle)} ({idle / report.loop:.0%})", "idle between replays"),
    ]
    if report.shares:
        figures.append((f"{known / max(1, report.total):.1%}", "of their time attributed"))
    cells = (f"<div class='figure'><b>{a}</b>{b}</div>" for a, b in figures)
    return f"<div class='figures'>{''.join(cells)}</div>"


def _findings(report: ProfileReport) -> str:
    if report.ok:
        return "<div class='finding good'>Nothing found that slows the loop down.</div>"
    return "".join(
        f"<div class='finding'><b>{escape(x.kind)}</b>: {escape(x.text)}</div>"
        for x in report.findings
    )


def _stages(report: ProfileReport) -> str:
    stages, colours = report.stages(), _stage_colours(report.stages())
    most, total = max(stages.values()), report.total
    rows = [
        f"<tr><td>{_key(colours[stage], stage)}</td><td class='wide'>"
        f"{_bar([(stage, ns)], colours, most)}</td>{_numbers(ns, total)}</tr>"
        for stage, ns in stages.items()
    ]
    rows.append(f"<tr><td><b>all replayed nodes</b></td><td></td>{_numbers(total, total)}</tr>")
    return _table(("stage", "", "GPU time", "share"), rows, "bars")


def _layers(report: ProfileReport) -> str:
    layers = report.layers()
    if not layers:
        return "<p class='quiet'>No layer was named in the captures.</p>"
    names = sorted(
        {part for parts in layers.values() for part in parts}, key=lambda x: (x == REST, x)
    )
    colours = {
        name: PALETTE[i % len(PALETTE)] for i, name in enumerate(n for n in names if n != REST)
    }
    colours[REST] = GREY
    most = max(sum(parts.values()) for parts in layers.values())
    rows = [
        f"<tr><td>{escape(stage)} layer {layer}</td><td class='wide'>"
        f"{_bar(_in_order(parts, names), colours, most)}</td>"
        f"{_numbers(sum(parts.values()), report.total)}</tr>"
        for (stage, layer), parts in layers.items()
    ]
    keys = "".join(_key(colours[name], name) for name in names)
    return f"<p>{keys}</p>{_table(('layer', '', 'GPU time', 'share'), rows, 'bars')}"


def _idle(report: ProfileReport, profile: Profile, replays: Sequence[Replay]) -> str:
    if not report.gaps:
        return "<p class='quiet'>One replay has nothing beside it.</p>"
    svg, words = timeline(profile, replays, report.gaps)
    colours = {
        "replay": BUSY,
        "GPU idle": IDLE,
        "graph launch": LAUNCH,
        "host waits for results": WAIT,
        "other synchronising call": SYNC,
    }
    keys = "".join(_key(colour, name) for name, colour in colours.items())
    return (
        f"<p>Around the longest: {words}.<br>{keys}</p>{svg}"
        f"<p>Every gap between two replays, in order:</p>{gap_chart(report.gaps)}"
    )


def _buckets(report: ProfileReport) -> str:
    heads = ("bucket", "replays", "nodes", "GPU time", "span", "launch call", "longest launch")
    rows = []
    for x in report.buckets:
        launch = ("-" if ns is None else time_text(ns) for ns in (x.launch, x.launch_max))
        nodes = "-" if x.nodes is None else str(x.nodes)
        cells = (x.bucket, str(x.replays), nodes, time_text(x.busy), time_text(x.span), *launch)
        rows.append(_row(cells))
    words = "<p class='quiet'>Medians: GPU time is the sum over the nodes of a replay.</p>"
    return words + _table(heads, rows)


def _kernels(report: ProfileReport) -> str:
    kernels = report.kernels()
    rows = [
        f"<tr><td class='name' title='{escape(kernel)}'>{escape(kernel)}</td>"
        f"<td class='text'>{escape(where)}</td><td>{count}</td>{_numbers(ns, report.total)}</tr>"
        for kernel, where, ns, count in kernels[: 2 * TOP]
    ]
    left = len(kernels) - len(rows)
    more = f"<p class='quiet'>{left} more take less time.</p>" if left else ""
    return _table(("kernel", "in", "runs", "GPU time", "share"), rows) + more


def _counters(report: ProfileReport) -> str:
    rows = [_row((name, *map(str, values))) for name, values in report.counters.items()]
    return _table(("counter", "least", "last", "most"), rows)


def _stage_colours(stages: Iterable[str]) -> dict[str, str]:
    known = dict(zip(STAGES, PALETTE, strict=False))
    return {stage: known.get(stage, GREY) for stage in stages}


def _in_order(parts: Mapping[str, int], names: Sequence[str]) -> list[tuple[str, int]]:
    return [(name, parts[name]) for name in names if name in parts]


def _bar(parts: Sequence[tuple[str, int]], colours: Mapping[str, str], whole: int) -> str:
    spans = (
        f"<span style='width:{100 * ns / max(1, whole):.2f}%;background:{colours[name]}' "
        f"title='{escape(name)}: {time_text(ns)}'></span>"
        for name, ns in parts
    )
    return f"<div class='bar'>{''.join(spans)}</div>"


def _numbers(ns: int, total: int) -> str:
    return f"<td>{time_text(ns)}</td><td>{ns / max(1, total):.1%}</td>"


def _key(colour: str, name: str) -> str:
    return f"<span class='key'><i style='background:{colour}'></i>{escape(name)}</span>"


def _row(cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def _table(heads: Sequence[str], rows: Sequence[str], kind: str = "") -> str:
    cells = (f"<th{' class=text' if head == 'in' else ''}>{escape(head)}</th>" for head in heads)
    return f"<table class='{kind}'><tr>{''.join(cells)}</tr>{''.join(rows)}</table>"
