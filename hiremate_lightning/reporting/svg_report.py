"""The memory of the plain and of the planned step as one SVG picture, for documents; nothing needs to be installed.

One column of pixels stands for all operations that share it: it shows the one with the most memory. The picture is dark
where the reader's screen is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from tempfile import TemporaryFile

from ..errors import ConfigurationError
from ..planning.plan import Plan, plan_title
from ..units import format_bytes, format_time
from .timeline import BUDGET, COLOURS, FAINT, INK, DrawnStep, binary_unit, plain_run, planned_run, resident_bands

MIN_WIDTH = 480
LEFT, RIGHT, TOP = 52, 12, 34  # pixels around a panel
PANEL, GAP = 170, 44  # pixels: height of a panel, and from one to the next
PEAK = "peak"  # its place in the legend has a circle, no colour
LINE = 20  # pixels of a line of text
LETTER = 6.6  # pixels of an average letter at 12 pixels
DARK = """<style>@media (prefers-color-scheme: dark) {
svg.hiremate { fill: #e6e8eb } .hiremate .paper { fill: #16181d } .hiremate .faint { fill: #9aa2ad }
.hiremate .grid { stroke: #2c3038 } .hiremate .turn { stroke: #9aa2ad } .hiremate .budget { stroke: #ff6fa3 }
.hiremate .budget-key { fill: #ff6fa3 } .hiremate .peak { stroke: #e6e8eb }
}</style>"""


def write_svg(plan: Plan, path: str | Path, width: int = 860) -> Path:
    """Draw the memory of a step over time, without a plan and with it.

    Args:
        plan: A plan.
        path: File to write, some tens of kilobytes. Its folder must exist.
        width: Pixels, at least 480.

    Returns:
        The path.

    Raises:
        ValueError: If the picture would be too narrow for its words.
        ConfigurationError: If its folder doesn't exist, or there is no plan.

    Example:
        >>> write_svg(get_plan(model), "plan.svg")
    """
    if width < MIN_WIDTH:
        raise ValueError(f"width must be at least {MIN_WIDTH} pixels, found {width}")
    check_plan(plan)
    path = writable(path)
    path.write_text(TimelineDrawing(plan, width).text(), encoding="utf-8")
    return path


def check_plan(plan: object) -> None:
    """Check that a plan was given, not the None of `get_plan` before the second step, nor a model."""
    if not isinstance(plan, Plan):
        raise ConfigurationError(
            f"Expected a plan to write, found {type(plan).__name__}. get_plan(model) returns it from the second "
            "training step on, and None before."
        )


def writable(path: str | Path, makes_folder: bool = False) -> Path:
    """Check that a file can be written, before work goes into what it is to hold.

    Args:
        path: Of the file.
        makes_folder: Whether its folder is made where it is missing.
    """
    path = Path(path)
    if not (makes_folder or path.parent.is_dir()):
        raise ConfigurationError(f"There is no folder {str(path.parent)!r} to write {path.name} to. Make it first.")
    if path.is_dir():
        raise ConfigurationError(f"{str(path)!r} is a folder. Name a file in it.")
    folder = next(place for place in path.absolute().parents if place.exists())
    try:
        with path.open("ab") if path.exists() else TemporaryFile(dir=folder):  # permissions do not tell root
            return path
    except OSError as error:
        raise ConfigurationError(f"Can't write {str(path)!r}: {error.strerror}. Name another file.") from error


def open_svg(width: int, height: int, title: str) -> list[str]:
    """Begin a picture with its title and its background."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="hiremate" width="{width}" height="{height}" role="img" '
        f'viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" font-size="12" fill="{INK}">',
        f"<title>{escape(title)}</title>",
        DARK,
        f'<rect class="paper" width="{width}" height="{height}" fill="white"/>',
    ]


@dataclass(frozen=True)
class TimelineDrawing:
    """The picture of one plan."""

    plan: Plan
    width: int  # pixels

    @cached_property
    def runs(self) -> tuple[DrawnStep, ...]:
        """The plain step, and the planned one below it."""
        return plain_run(self.plan), planned_run(self.plan)

    @cached_property
    def columns(self) -> int:
        """Width of a panel, in pixels."""
        return self.width - LEFT - RIGHT

    @cached_property
    def most_bytes(self) -> int:
        """The highest that is drawn; a budget far above all memory is not."""
        peak = max(self.plan.resident_bytes + run.simulation.peak_bytes for run in self.runs)
        return max(peak, self.plan.budget_bytes if self._shows_budget(peak) else 0, 1)

    def _shows_budget(self, peak_bytes: int) -> bool:
        return self.plan.budget_bytes <= 1.15 * peak_bytes

    @cached_property
    def end_ms(self) -> float:
        """Time at the right edge."""
        return max(run.starts_ms[-1] for run in self.runs) or 1.0

    @cached_property
    def legend(self) -> list[tuple[str, str]]:
        """Colour and name of each band that occurs, in stacking order."""
        bands = {band for run in self.runs for band in run.bands}
        parts = [(colour, name) for name, colour, _ in resident_bands(self.plan)]
        parts += [(COLOURS[band], band.value) for band in COLOURS if band in bands]
        parts.append((PEAK, "peak"))
        if self._shows_budget(self.most_bytes):
            parts.append((BUDGET, f"budget, {format_bytes(self.plan.budget_bytes)}"))
        return parts

    @property
    def tops(self) -> list[int]:
        """Upper edge of each panel, in pixels."""
        return [TOP + row * (PANEL + GAP) for row in range(len(self.runs))]

    def text(self) -> str:
        """Write the picture."""
        panels = [part for run, top in zip(self.runs, self.tops, strict=True) for part in self._panel(run, top)]
        below = self.tops[-1] + PANEL
        keys = [(_key(colour), name) for colour, name in self.legend]
        legend, height = lay_out(keys, below + 2 * LINE + 8, self.width)
        return "\n".join(
            [
                *open_svg(self.width, int(height), f"{plan_title(self.plan)}: memory of a step"),
                *panels,
                *self._time_axis(below),
                *legend,
                "</svg>\n",
            ]
        )

    def _panel(self, run: DrawnStep, top: int) -> Iterable[str]:
        peak = format_bytes(self.plan.resident_bytes + run.simulation.peak_bytes)
        words = f"<tspan font-weight='600'>{run.name.capitalize()} step</tspan>: peak {peak}"
        yield f'<text x="{LEFT}" y="{top - 8}">{words}, {format_time(run.simulation.time_ms)}</text>'
        scale, unit = binary_unit(self.most_bytes)
        for tick in ticks(self.most_bytes / scale):
            y = self._y(tick * scale, top)
            yield f'<path d="M{LEFT} {y}H{self.width - RIGHT}" class="grid" stroke="#eceef1"/>'
            yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
        yield f'<text x="{LEFT - 6}" y="{top - 8}" text-anchor="end" class="faint" fill="{FAINT}">{unit}</text>'
        moments = run.by_column(self.columns, self.end_ms)
        floor = [0] * len(moments)
        resident = [(colour, [size] * len(run.simulation.timeline)) for _, colour, size in resident_bands(self.plan)]
        for colour, sizes in (*resident, *((COLOURS[band], sizes) for band, sizes in run.bands.items())):
            ceiling = [low + sizes[moment] for low, moment in zip(floor, moments, strict=True)]
            if ceiling != floor:
                yield f'<path d="{self._area(floor, ceiling, top)}" fill="{colour}"/>'
            floor = ceiling
        turn = LEFT + run.starts_ms[run.simulation.turn] / self.end_ms * self.columns
        yield f'<path d="M{turn:.1f} {top}V{top + PANEL}" class="turn" stroke="{FAINT}" stroke-dasharray="1 3"/>'
        if self._shows_budget(self.most_bytes):
            yield budget_line(f"M{LEFT} {self._y(self.plan.budget_bytes, top)}H{self.width - RIGHT}")
        # The peak may be at an operation that takes no time.
        x = LEFT + run.starts_ms[run.peak_position] / self.end_ms * self.columns
        yield ring(x, self._y(self.plan.resident_bytes + run.simulation.peak_bytes, top))

    def _area(self, floor: Sequence[int], ceiling: Sequence[int], top: int) -> str:
        """Outline what is between two lines of steps: the upper one to the right, the lower one back."""
        forth = [(i, y) for i, y in enumerate(ceiling) if not i or y != ceiling[i - 1]]
        back = [(i + 1, y) for i, y in enumerate(floor) if i + 1 == len(floor) or y != floor[i + 1]]
        upper = "".join(f"H{LEFT + i}V{self._y(y, top)}" for i, y in forth)
        lower = "".join(f"H{LEFT + i}V{self._y(y, top)}" for i, y in reversed(back))
        return f"M{LEFT} {self._y(ceiling[0], top)}{upper}{lower}H{LEFT}Z"

    def _y(self, size_bytes: float, top: int) -> float:
        return round(top + PANEL * (1 - size_bytes / self.most_bytes), 1)

    def _time_axis(self, top: int) -> Iterable[str]:
        scale, unit = (1000, "seconds") if self.end_ms >= 5000 else (1, "milliseconds")
        for tick in ticks(self.end_ms / scale):
            x = LEFT + tick * scale / self.end_ms * self.columns
            yield f'<text x="{x:.1f}" y="{top + 16}" text-anchor="middle">{tick:g}</text>'
        yield f'<text x="{LEFT + self.columns / 2}" y="{top + 16 + LINE}" text-anchor="middle">{unit}</text>'


Key = Callable[[float, float], str]  # draws what stands before a name in a legend, around a point


def lay_out(entries: Iterable[tuple[Key, str]], top: float, width: int) -> tuple[list[str], float]:
    """Lay a legend out in rows; return it, and the pixels above what comes below it."""
    parts, x, y = [], float(LEFT), top + LINE
    for key, name in entries:
        needed = 34 + LETTER * len(name)
        if x > LEFT and x + needed > width:
            x, y = float(LEFT), y + LINE
        parts += [key(x + 6, y - 4), f'<text x="{x + 18:.1f}" y="{y:g}">{escape(name)}</text>']
        x += needed
    return parts, y + LINE


def budget_line(path: str) -> str:
    """Draw the line of the budget."""
    return f'<path d="{path}" class="budget" stroke="{BUDGET}" stroke-width="2" stroke-dasharray="6 4"/>'


def ring(x: float, y: float) -> str:
    """Draw the mark of plain training, and of a peak."""
    return f'<circle cx="{x:.1f}" cy="{y}" r="5" class="peak" fill="none" stroke="{INK}" stroke-width="2"/>'


def stroke(colour: str) -> Key:
    """Return what draws a piece of a line."""
    kind = ' class="turn"' if colour == FAINT else ""
    return lambda x, y: f'<path d="M{x - 6:.1f} {y}h12"{kind} stroke="{colour}" stroke-width="2"/>'


def _key(colour: str) -> Key:
    """Return what draws the key of a band, of the budget or of the peak."""
    kind = ' class="budget-key"' if colour == BUDGET else ""

    def square(x: float, y: float) -> str:
        return f'<rect x="{x - 6:.1f}" y="{y - 6}" width="12" height="12" rx="2"{kind} fill="{colour}"/>'

    return ring if colour == PEAK else square


def ticks(most: float, about: int = 5) -> list[float]:
    """Choose round numbers from 0 to a maximum."""
    rough = most / about
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough)
    return [round(i * step, 10) for i in range(int(most / step + 1e-9) + 1)]
