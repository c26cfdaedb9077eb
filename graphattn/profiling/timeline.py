"""SVG: some replays on a line of time with what the host did above, and the idle time of all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from graphattn.profiling.events import Profile
from graphattn.profiling.findings import SYNCHRONISING
from graphattn.profiling.gaps import Gap
from graphattn.profiling.replays import Replay, is_graph_launch
from graphattn.profiling.units import time_text

WIDTH, ROW, LABEL = 1180, 26, 110
SHOWN = 24  # replays on the line of time
COLUMNS = 500  # of the chart of all gaps
BUSY, IDLE, LAUNCH, WAIT, SYNC = "#2f6f9f", "#d9534f", "#4a4a4a", "#c9c9c9", "#e08a00"


@dataclass(frozen=True, slots=True)
class _Scale:
    start: int
    end: int

    def x(self, time: int) -> float:
        """Pixels from the left."""
        share = (time - self.start) / max(1, self.end - self.start)
        return LABEL + min(1.0, max(0.0, share)) * (WIDTH - LABEL)

    def rect(self, row: int, start: int, end: int, colour: str, title: str) -> str:
        """A box in a row, with words for the pointer."""
        left, width = self.x(start), max(1.0, self.x(end) - self.x(start))
        return (
            f'<rect x="{left:.1f}" y="{row * ROW + 4}" width="{width:.1f}" height="{ROW - 8}" '
            f'fill="{colour}"><title>{escape(title)}</title></rect>'
        )


def timeline(profile: Profile, replays: Sequence[Replay], gaps: Sequence[Gap]) -> tuple[str, str]:
    """Some replays of one process around the longest idle time: the SVG, and what it shows."""
    process = max(gaps, key=lambda x: x.idle).process if gaps else replays[0].process
    own = [x for x in replays if x.process == process]
    worst = max((x for x in gaps if x.process == process), key=lambda x: x.idle, default=None)
    first = max(0, (worst.after if worst else 0) - SHOWN // 2 + 1)
    shown = own[first : first + SHOWN]
    starts = [x.launch.start if x.launch else x.start for x in shown]
    scale = _Scale(min(starts), max(x.end for x in shown))
    rows = [("host", _host(profile, process, scale, shown)), ("GPU", _device(shown, scale))]
    boxes = [box for _, found in rows for box in found]
    boxes += [_label(name, row) for row, (name, _) in enumerate(rows)]
    boxes += _idle([x for x in gaps if x.process == process], scale)
    boxes.append(_axis(scale, len(rows)))
    height = len(rows) * ROW + 24
    last, length = first + len(shown) - 1, time_text(scale.end - scale.start)
    words = f"replays {first} to {last} of {len(own)}, {length}"
    return _svg(height, boxes, "line of time"), words


def gap_chart(gaps: Sequence[Gap]) -> str:
    """A column for each gap, or for the longest of neighbours when they are many."""
    height, base = 120, 100
    most = max((x.idle for x in gaps), default=0)
    count = min(COLUMNS, len(gaps))
    boxes = [
        f'<text x="0" y="16" class="axis">{time_text(most)}</text>',
        f'<text x="0" y="{base}" class="axis">0</text>',
        f'<line x1="{LABEL}" y1="{base}" x2="{WIDTH}" y2="{base}" stroke="#999"/>',
    ]
    width = (WIDTH - LABEL) / max(1, count)
    for column in range(count):
        members = gaps[column * len(gaps) // count : (column + 1) * len(gaps) // count]
        worst = max(members, key=lambda x: x.idle)
        tall = (base - 8) * worst.idle / max(1, most)
        title = f"after replay {worst.after} ({worst.before_bucket}): {time_text(worst.idle)} idle"
        boxes.append(
            f'<rect x="{LABEL + column * width:.1f}" y="{base - tall:.1f}" '
            f'width="{min(28.0, max(1.0, width - 1)):.1f}" height="{max(1.0, tall):.1f}" '
            f'fill="{IDLE}"><title>{escape(title)}</title></rect>'
        )
    boxes.append(f'<text x="{LABEL}" y="{height - 4}" class="axis">first replay</text>')
    boxes.append(f'<text x="{WIDTH}" y="{height - 4}" class="axis end">last</text>')
    return _svg(height, boxes, "idle time between replays")


def _device(shown: Sequence[Replay], scale: _Scale) -> list[str]:
    return [
        scale.rect(1, x.start, x.end, BUSY, f"{x.bucket}: {time_text(x.end - x.start)}")
        for x in shown
    ]


def _idle(gaps: Iterable[Gap], scale: _Scale) -> list[str]:
    inside = (x for x in gaps if scale.start <= x.start and x.end <= scale.end and x.idle)
    boxes = []
    for gap in inside:
        boxes.append(scale.rect(1, gap.start, gap.end, IDLE, f"idle {time_text(gap.idle)}"))
        left, right = scale.x(gap.start), scale.x(gap.end)
        if right - left > 70:
            boxes.append(
                f'<text x="{(left + right) / 2:.0f}" y="{2 * ROW - 9}" class="inside">'
                f"idle {time_text(gap.idle)}</text>"
            )
    return boxes


def _host(profile: Profile, process: int, scale: _Scale, shown: Sequence[Replay]) -> list[str]:
    threads = {x.launch.thread for x in shown if x.launch}
    boxes = [
        scale.rect(0, x.start, x.end, WAIT, f"wait for results: {time_text(x.end - x.start)}")
        for x in profile.ranges
        if x.name == "wait" and x.thread in threads and _meets(x.start, x.end, scale)
    ]
    waits = [(x.start, x.end) for x in profile.ranges if x.name == "wait" and x.thread in threads]
    for call in profile.calls:
        if call.process != process or not _meets(call.start, call.end, scale):
            continue
        title = f"{call.name}: {time_text(call.duration)}"
        if is_graph_launch(call):
            boxes.append(scale.rect(0, call.start, call.end, LAUNCH, title))
        elif call.name in SYNCHRONISING and not any(a <= call.start < b for a, b in waits):
            boxes.append(scale.rect(0, call.start, call.end, SYNC, title))
    return boxes


def _meets(start: int, end: int, scale: _Scale) -> bool:
    return start < scale.end and end > scale.start


def _label(name: str, row: int) -> str:
    return f'<text x="0" y="{row * ROW + 18}">{escape(name)}</text>'


def _axis(scale: _Scale, rows: int) -> str:
    y, length = rows * ROW + 16, scale.end - scale.start
    marks = [(LABEL + i * (WIDTH - LABEL) / 4, i * length / 4) for i in range(5)]
    return "".join(
        f'<text x="{x:.0f}" y="{y}" class="axis {"end" if x > WIDTH - 1 else ""}">'
        f"{'0' if not time else time_text(time)}</text>"
        for x, time in marks
    )


def _svg(height: int, boxes: Iterable[str], title: str) -> str:
    body = "\n".join(boxes)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'aria-label="{escape(title)}">\n{body}\n</svg>'
    )
