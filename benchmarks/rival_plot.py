"""Draw time over eager against peak, one panel for each model, as one SVG picture that needs no library."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rival_tables import EAGER, Point, frontier, is_ours

WIDTH, HEIGHT, COLUMNS = 360, 270, 3
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 30, 38
LEGEND = 26
COLOURS = {
    "ours": "#0b6e4f",
    "fused": "#2aa876",
    "checkpoint": "#c1440e",
    "library": "#8a5a00",
    "budget": "#3157a4",
    "inductor": "#7b2d8b",
}
LABELS = {
    "ours": "hiremate",
    "fused": "hiremate, compile=inductor",
    "checkpoint": "torch.utils.checkpoint",
    "library": "the library's own",
    "budget": "activation_memory_budget, aot_eager",
    "inductor": "activation_memory_budget, inductor",
}


@dataclass(frozen=True)
class Axis:
    """A range of values, and where they lie on the page."""

    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        """Give the place of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def family(method: str) -> str:
    """Give the kind of method that a point is drawn as; "" for what is not drawn."""
    if is_ours(method):
        return "ours"
    name = method.partition("-")[0].rstrip("0123456789")
    return name if name in COLOURS else ""


def ticks(low: float, high: float) -> list[float]:
    """Give about six round values in a range."""
    rough = (high - low) / 6
    power = 10 ** math.floor(math.log10(rough))
    step = next(step for step in (1, 2, 5, 10) if step * power >= rough) * power
    first = math.ceil(low / step)
    return [index * step for index in range(first, math.floor(high / step) + 1)]


def text(x: float, y: float, words: str, **style: str) -> str:
    """Write words at a place."""
    attributes = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in style.items())
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{html.escape(words)}</text>'


def grid(across: Axis, up: Axis) -> list[str]:
    """Draw the lines and numbers of both axes."""
    parts = []
    for value in ticks(across.low, across.high):
        x = across.place(value)
        parts.append(f'<line x1="{x:.1f}" y1="{up.start:.1f}" x2="{x:.1f}" y2="{up.end:.1f}" stroke="#e4e4e4"/>')
        parts.append(text(x, up.start + 14, f"{100 * value:.0f} %", text_anchor="middle"))
    for value in ticks(up.low, up.high):
        y = up.place(value)
        parts.append(
            f'<line x1="{across.start:.1f}" y1="{y:.1f}" x2="{across.end:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>'
        )
        parts.append(text(across.start - 5, y + 3, f"{value:.2f}", text_anchor="end"))
    return parts


def mark(point: Point, across: Axis, up: Axis) -> str:
    """Draw a point with the quartiles of its time, and what tells it from others of its family."""
    colour = COLOURS.get(family(point.method), "#333333")
    x, y = across.place(point.peak), up.place(point.time.median)
    low, high = up.place(point.time.low), up.place(point.time.high)
    title = f"{point.method}: peak {100 * point.peak:.1f} %, time {point.time.median:.3f}"
    parts = [f'<line x1="{x:.1f}" y1="{low:.1f}" x2="{x:.1f}" y2="{high:.1f}" stroke="{colour}" opacity="0.5"/>']
    parts.append(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{colour}"><title>{html.escape(title)}</title></circle>'
    )
    if not is_ours(point.method) and point.method != EAGER:
        parts.append(text(x + 5, y - 4, re.sub("^[a-z]+-?", "", point.method), fill=colour))
    return "".join(parts)


def panel(name: str, points: Sequence[Point], left: float, top: float) -> str:
    """Draw one model."""
    shown = [p for p in points if p.method == EAGER or family(p.method)]
    highest = max([p.time.high for p in shown], default=1.0)
    lowest = min([p.time.low for p in shown], default=1.0)
    widest = max([p.peak for p in shown], default=1.0)
    margin = max(0.02, 0.05 * (highest - lowest))
    across = Axis(0.0, 1.04 * max(1.0, widest), left + LEFT, left + WIDTH - RIGHT)
    up = Axis(lowest - margin, highest + margin, top + HEIGHT - BOTTOM, top + TOP)
    parts = [text(left + LEFT, top + 18, name, font_size="13", font_weight="bold"), *grid(across, up)]
    parts.append(text(across.end, top + HEIGHT - 8, "peak, of eager's", text_anchor="end"))
    parts.append(text(across.end, top + 18, "time over eager", text_anchor="end"))
    for kind in ("ours", "fused"):
        own = frontier(p for p in shown if family(p.method) == kind)
        line = " ".join(f"{across.place(p.peak):.1f},{up.place(p.time.median):.1f}" for p in own)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[kind]}"/>')
    return "".join([*parts, *(mark(p, across, up) for p in shown)])


def legend(drawn: Sequence[str], top: float) -> str:
    """Name the colours that are used."""
    parts, x = [], float(LEFT)
    for kind in (kind for kind in COLOURS if kind in drawn):
        parts.append(f'<circle cx="{x:.1f}" cy="{top:.1f}" r="3.2" fill="{COLOURS[kind]}"/>')
        parts.append(text(x + 8, top + 4, LABELS[kind]))
        x += 24 + 6.2 * len(LABELS[kind])
    return "".join(parts)


def draw(models: dict[str, Sequence[Point]]) -> str:
    """Draw all models.

    Args:
        models: Their points, by name.

    Returns:
        The text of an SVG file.
    """
    columns = min(COLUMNS, len(models))
    width = max(columns, 2) * WIDTH
    height = math.ceil(len(models) / columns) * HEIGHT + LEGEND
    drawn = {family(point.method) for points in models.values() for point in points}
    panels = (
        panel(name, points, index % columns * WIDTH, LEGEND + index // columns * HEIGHT)
        for index, (name, points) in enumerate(models.items())
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="10" fill="#333333"><rect width="100%" height="100%" fill="white"/>'
        f"{legend(sorted(drawn), 16)}{''.join(panels)}</svg>\n"
    )
