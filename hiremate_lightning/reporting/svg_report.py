"""Pictures of a plan as SVG, for documents and pages: memory over time, and extra time over budget.

If several operations share a column of pixels, it shows the one with the most memory. Pictures of many methods scale
extra time by its square root, so that 2 % and 200 % are both readable; methods differ in the colour and shape of their
marks. Pictures are dark if the reader's screen is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from tempfile import TemporaryFile

from ..errors import ConfigurationError
from ..planning.comparing import Comparison, Curve
from ..planning.plan import Plan, plan_title
from ..records.costs import step_time_ms
from ..units import binary_unit, format_bytes, format_time
from .timeline import BUDGET, COLOURS, FAINT, INK, Band, DrawnStep, eager_run, planned_run, resident_bands

MIN_WIDTH = 480
LEFT, RIGHT, TOP = 52, 12, 34  # pixels around a panel of memory
PANEL, GAP = 170, 44  # pixels: height of a panel of memory, and space to the next
BUDGET_SIDE, BUDGET_TOP, BUDGET_BELOW = 16, 40, 48  # pixels right of, above and below a drawing over budgets
FRONTIER_HEIGHT, METHODS_HEIGHT = 260, 300  # height in pixels of the drawing for one plan, and for methods
LEAST, LEAST_OF_METHODS = 0.01, 0.03  # least extra time at the top of the axis, for one plan and for methods
SPARE = 1.06  # factor of space around the outermost values
RATIOS = (0.0, 0.01, 0.03, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # extra times that a square-root axis may name
APART = 11  # least pixels between two named extra times
LINE = 20  # height in pixels of a line of text
LETTER = 6.6  # width in pixels of an average letter of size 12
SHOWN_BUDGET = 1.15  # a budget above this many times the highest peak is not drawn
DARK = """<style>@media (prefers-color-scheme: dark) {
svg.hiremate { fill: #e6e8eb } .hiremate .paper { fill: #16181d } .hiremate .faint { fill: #9aa2ad }
.hiremate .grid { stroke: #2c3038 } .hiremate .turn { stroke: #9aa2ad } .hiremate .budget { stroke: #ff6fa3 }
.hiremate .budget-key { fill: #ff6fa3 } .hiremate .peak { stroke: #e6e8eb }
}</style>"""
FAINT_TEXT, FAINT_LINE = f'class="faint" fill="{FAINT}"', f'class="turn" stroke="{FAINT}"'
METHOD_COLOURS = (
    *("#4477aa", "#ee7733", "#228833", "#cc3377", "#009988", "#8c6bb1"),
    *("#b8860b", "#33bbee", "#882255", "#7f7f7f", "#66a61e", "#332288"),
)
METHOD_SHAPES = (
    "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z",
    "m-3.5 -3.5h7v7h-7Z",
    "m0 -5l4.5 8h-9Z",
    "m0 -5l5 5l-5 5l-5 -5Z",
    "m0 5l4.5 -8h-9Z",
)
# Marks around a point, in a picture and in its legend.
RING = f'<circle cx="{{x}}" cy="{{y}}" r="5" class="peak" fill="none" stroke="{INK}" stroke-width="2"/>'  # eager, peaks
DOT = f'<circle cx="{{x}}" cy="{{y}}" r="6" class="budget-key" fill="{BUDGET}"/>'
CROSS = f'<path d="M{{x}} {{y}}m-6 -6l12 12m0 -12l-12 12" class="peak" stroke="{INK}" stroke-width="2"/>'
STROKE = '<path d="M{{x}} {{y}}m-6 0h12" {look}/>'
SQUARE = '<rect x="{{x}}" y="{{y}}" transform="translate(-6 -6)" width="12" height="12" rx="2" {look}/>'
FOUND_DOT = f'<circle cx="{{x}}" cy="{{y}}" r="3" fill="{COLOURS[Band.SAVED]}"/>'
FOUND_LINE = f'stroke="{COLOURS[Band.SAVED]}" fill="none" stroke-width="2"'
STRAIGHT, ACROSS_FIRST, UP_FIRST = "L{x} {y}", "H{x}V{y}", "V{y}H{x}"  # steps of a line to the next point
PROVEN, PROVEN_LINE = "proven: nothing is faster", f'{FAINT_LINE} fill="none" stroke-width="2"'

Point = tuple[float, float]  # values of the horizontal and the vertical axis, such as bytes and an extra time (a ratio)


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
    path = plan_file(plan, path)
    path.write_text(TimelineDrawing(plan, width).text(), encoding="utf-8")
    return path


def plan_file(plan: object, path: str | Path) -> Path:
    """Return the path of a file, after checking that it can be written and that `plan` is a plan."""
    if not isinstance(plan, Plan):
        raise ConfigurationError(
            f"Expected a plan to write, found {type(plan).__name__}. get_plan(model) returns it from the second "
            "training step on, and None before."
        )
    return writable(path)


def writable(path: str | Path, makes_folder: bool = False) -> Path:
    """Return the path of a file if it can be written; `makes_folder` allows a missing folder."""
    path = Path(path)
    if not (makes_folder or path.parent.is_dir()):
        raise ConfigurationError(f"There is no folder {str(path.parent)!r} to write {path.name} to. Make it first.")
    if path.is_dir():
        raise ConfigurationError(f"{str(path)!r} is a folder. Name a file in it.")
    folder = next(place for place in path.absolute().parents if place.exists())
    try:
        with path.open("ab") if path.exists() else TemporaryFile(dir=folder):  # permissions are no test for root
            return path
    except OSError as error:
        raise ConfigurationError(f"Can't write {str(path)!r}: {error.strerror}. Name another file.") from error


# ---------------------------------------------------------------- what all pictures are made of


def open_svg(width: int, height: int, title: str) -> list[str]:
    """Begin a picture with its title and its background."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="hiremate" width="{width}" height="{height}" role="img" '
        f'viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" font-size="12" fill="{INK}">',
        f"<title>{escape(title)}</title>",
        DARK,
        f'<rect class="paper" width="{width}" height="{height}" fill="white"/>',
    ]


def _text(x: float, y: float, words: str, look: str = "") -> str:
    """Write text, which may contain markup."""
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{words}</text>'


def _path(places: str, look: str) -> str:
    return f'<path d="{places}" {look}/>'


def _marked(mark: str, point: Point) -> str:
    return mark.format(x=round(point[0], 1), y=round(point[1], 1))


@dataclass(frozen=True)
class Axes:
    """The two axes of a drawing: converts values to pixels."""

    edges: tuple[float, float, float, float]  # left, right, upper and lower edge, in pixels
    low: float  # value at the left edge
    high: float  # value at the right edge
    most: float  # value at the upper edge; the lower edge is 0
    is_root: bool = False  # whether the vertical axis is of square roots

    def x(self, value: float) -> float:
        """Convert a horizontal value to pixels."""
        left, right, *_ = self.edges
        return round(left + (value - self.low) / (self.high - self.low) * (right - left), 1)

    def y(self, value: float) -> float:
        """Convert a vertical value to pixels."""
        *_, top, bottom = self.edges
        share = max(0.0, value) / self.most
        return round(bottom - (math.sqrt(share) if self.is_root else share) * (bottom - top), 1)

    def place(self, point: Point) -> Point:
        """Convert a point to pixels."""
        return self.x(point[0]), self.y(point[1])

    def levels(self, named: Iterable[tuple[float, float]]) -> Iterator[str]:
        """Draw horizontal lines at vertical values, each with its number."""
        left, right, *_ = self.edges
        for value, number in named:
            yield _path(f"M{left} {self.y(value)}H{right}", 'class="grid" stroke="#eceef1"')
            yield _text(left - 6, self.y(value) + 4, f"{number:g}", 'text-anchor="end"')

    def bottom(self, scale: float, about: int, words: str, look: str = "") -> Iterator[str]:
        """Write round numbers of a scale below the drawing, and their unit in words."""
        left, right, _, bottom = self.edges
        for tick in ticks(self.high / scale, about):
            if tick * scale >= self.low:
                yield _text(self.x(tick * scale), bottom + 16, f"{tick:g}", 'text-anchor="middle"')
        yield _text((left + right) / 2, bottom + 16 + LINE, words, f'text-anchor="middle" {look}')

    def line(self, points: Iterable[Point], step: str) -> str:
        """Connect points, each step from one to the next by `STRAIGHT` or by lines along the axes."""
        first, *places = map(self.place, points)
        return _marked("M{x} {y}", first) + "".join(_marked(step, place) for place in places)


def lay_out(entries: Iterable[tuple[str, str]], top: float, width: int) -> tuple[list[str], float]:
    """Lay out the marks and names of a legend in rows; return the rows, and the pixel position below them."""
    parts, x, y = [], float(LEFT), top + LINE
    for mark, name in entries:
        needed = 34 + LETTER * len(name)
        if x > LEFT and x + needed > width:
            x, y = float(LEFT), y + LINE
        parts += [_marked(mark, (x + 6, y - 4)), _text(x + 18, y, escape(name))]
        x += needed
    return parts, y + LINE


def _picture(title: str, width: int, parts: Iterable[str], keys: Iterable[tuple[str, str]], legend_top: float) -> str:
    """Put a picture together, with its legend at the bottom."""
    legend, height = lay_out(keys, legend_top, width)
    return "\n".join([*open_svg(width, int(height), title), *parts, *legend, "</svg>\n"])


def _budget_line(path: str) -> str:
    return _path(path, f'class="budget" stroke="{BUDGET}" stroke-width="2" stroke-dasharray="6 4"')


def ticks(most: float, about: int = 5) -> list[float]:
    """Choose about `about` round numbers from 0 to a maximum."""
    rough = most / about
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough)
    return [round(i * step, 10) for i in range(int(most / step + 1e-9) + 1)]


# ---------------------------------------------------------------- memory over time


class TimelineDrawing:
    """A picture of the memory of the eager step, and below it of the planned step; the width is in pixels."""

    def __init__(self, plan: Plan, width: int) -> None:
        self.plan, self.width, self.runs = plan, width, (eager_run(plan), planned_run(plan))
        self.tops = [TOP + row * (PANEL + GAP) for row in range(len(self.runs))]  # upper edges of the panels
        self.end_ms = max(run.starts_ms[-1] for run in self.runs) or 1.0  # time at the right edge
        self._peak_bytes = max(plan.unplanned_peak_bytes, plan.planned_peak_bytes)
        self._shows_budget = plan.budget_bytes <= SHOWN_BUDGET * self._peak_bytes

    def _axes(self, top: int) -> Axes:
        most_bytes = max(self._peak_bytes, self.plan.budget_bytes if self._shows_budget else 0, 1)
        return Axes((LEFT, self.width - RIGHT, top, top + PANEL), 0.0, self.end_ms, most_bytes)

    def text(self) -> str:
        """Write the picture."""
        panels = [part for run, top in zip(self.runs, self.tops, strict=True) for part in self._panel(run, top)]
        axes, below = self._axes(self.tops[-1]), self.tops[-1] + PANEL
        scale, unit = (1000, "seconds") if self.end_ms >= 5000 else (1, "milliseconds")
        title, parts = f"{plan_title(self.plan)}: memory of a step", [*panels, *axes.bottom(scale, 5, unit)]
        return _picture(title, self.width, parts, self._legend(), below + 2 * LINE + 8)

    def _legend(self) -> Iterator[tuple[str, str]]:
        """Name each band that occurs, in stacking order."""
        bands = {band for run in self.runs for band in run.bands}
        named = [(name, colour) for name, colour, _ in resident_bands(self.plan)]
        named += [(band.value, colour) for band, colour in COLOURS.items() if band in bands]
        yield from ((SQUARE.format(look=f'fill="{colour}"'), name) for name, colour in named)
        yield RING, "peak"
        if self._shows_budget:
            square = SQUARE.format(look=f'class="budget-key" fill="{BUDGET}"')
            yield square, f"budget, {format_bytes(self.plan.budget_bytes)}"

    def _panel(self, run: DrawnStep, top: int) -> Iterator[str]:
        axes, peak_bytes = self._axes(top), self.plan.resident_bytes + run.simulation.peak_bytes
        title = f"<tspan font-weight='600'>{run.name.capitalize()} step</tspan>"
        words = f"peak {format_bytes(peak_bytes)}, {format_time(run.simulation.time_ms)}"
        yield _text(LEFT, top - 8, f"{title}: {words}")
        scale, unit = binary_unit(int(axes.most))
        yield from axes.levels((tick * scale, tick) for tick in ticks(axes.most / scale))
        yield _text(LEFT - 6, top - 8, unit, f'text-anchor="end" {FAINT_TEXT}')
        moments = run.by_column(self.width - LEFT - RIGHT, self.end_ms)
        floor = [0] * len(moments)
        resident = [(colour, [size] * len(run.simulation.timeline)) for _, colour, size in resident_bands(self.plan)]
        for colour, sizes in (*resident, *((COLOURS[band], sizes) for band, sizes in run.bands.items())):
            ceiling = [low + sizes[moment] for low, moment in zip(floor, moments, strict=True)]
            if ceiling != floor:
                yield _path(_area(axes, floor, ceiling), f'fill="{colour}"')
            floor = ceiling
        turn_ms = run.starts_ms[run.simulation.turn]
        yield _path(f"M{axes.x(turn_ms)} {top}V{top + PANEL}", f'{FAINT_LINE} stroke-dasharray="1 3"')
        if self._shows_budget:
            yield _budget_line(f"M{LEFT} {axes.y(self.plan.budget_bytes)}H{self.width - RIGHT}")
        # The peak may be at an operation that takes no time.
        yield _marked(RING, axes.place((run.starts_ms[run.peak_position], peak_bytes)))


def _area(axes: Axes, floor: Sequence[int], ceiling: Sequence[int]) -> str:
    """Outline the area between two step lines: along the upper line, and back along the lower one."""
    forth = [(i, size) for i, size in enumerate(ceiling) if not i or size != ceiling[i - 1]]
    back = [(i + 1, size) for i, size in enumerate(floor) if i + 1 == len(floor) or size != floor[i + 1]]
    outline = "".join(f"H{LEFT + i}V{axes.y(size)}" for i, size in (*forth, *reversed(back)))
    return f"M{LEFT} {axes.y(ceiling[0])}{outline}H{LEFT}Z"


# ---------------------------------------------------------------- extra time over budget


@dataclass(frozen=True, slots=True)
class Series:
    """Pairs of budget and extra time, and how they are drawn."""

    name: str
    points: tuple[Point, ...]  # in order of budgets
    mark: str = ""  # the mark at each point
    look: str = ""  # style of the line through the points
    step: str = STRAIGHT  # how the line goes from one point to the next
    end: tuple[Point, ...] = ()  # where the line continues to, without marks

    @property
    def key(self) -> str:
        """The mark before the name in a legend."""
        return self.mark if self.mark and self.step == STRAIGHT else STROKE.format(look=self.look)

    def draw(self, axes: Axes) -> Iterator[str]:
        """Draw the line and the marks; a method's marks show their values under the pointer."""
        if self.look and self.points:
            yield _path(axes.line((*self.points, *self.end), self.step), self.look)
        for point in self.points if self.mark else ():
            mark = _marked(self.mark, axes.place(point))
            title = f"<title>{escape(f'{self.name}: +{100 * point[1]:.1f} %')}</title>"
            yield mark.replace("/>", f">{title}</path>") if self.end else mark


@dataclass(frozen=True)
class Panel:
    """A drawing of extra time over budgets of one step: series in the order of the legend, proven bounds first."""

    title: str  # text above the panel
    series: tuple[Series, ...]
    budget_bytes: int | None = None  # budget of the plan; None for methods, drawn on a square-root axis

    @property
    def keys(self) -> list[tuple[str, str]]:
        """The marks and names of the legend."""
        return [(series.key, series.name) for series in self.series]

    def draw(self, left: float, top: float, width: int, height: int) -> Iterator[str]:
        """Draw the panel, axes included, at a place and with a size in pixels."""
        is_root = self.budget_bytes is None
        points = [point for series in self.series for point in series.points]
        budgets = [size_bytes for size_bytes, _ in points]
        spare = (SPARE - 1) * (max(budgets) - min(budgets)) or 1
        most = SPARE * max(LEAST_OF_METHODS if is_root else LEAST, *(extra for _, extra in points))
        edges = left + LEFT, left + width - BUDGET_SIDE, top + BUDGET_TOP, top + height - BUDGET_BELOW
        axes = Axes(edges, min(budgets) - spare, max(budgets) + spare, most, is_root)
        if self.title:
            yield _text(left + LEFT, top + 16, escape(self.title), 'font-weight="600"')
        named = _apart(axes) if is_root else [percent / 100 for percent in ticks(100 * most)]
        yield from axes.levels((extra, 100 * extra) for extra in named)
        yield _text(edges[0], edges[2] - 8, "extra time, %", FAINT_TEXT)
        scale, unit = binary_unit(int(axes.high))
        yield from axes.bottom(scale, 8, f"budget, {unit}", FAINT_TEXT)
        if self.budget_bytes is not None and axes.low <= self.budget_bytes <= axes.high:
            yield _budget_line(f"M{axes.x(self.budget_bytes)} {edges[2]}V{edges[3]}")
        for series in sorted(self.series, key=lambda series: series.name != PROVEN):
            yield from series.draw(axes)


def _apart(axes: Axes) -> Iterator[float]:
    """Yield the extra times that a square-root axis has space to name."""
    below = math.inf
    for extra in (ratio for ratio in RATIOS if ratio <= axes.most):
        if below - axes.y(extra) >= APART:
            below = axes.y(extra)
            yield extra


def panel_svg(panel: Panel, title: str, width: int = 760, height: int = METHODS_HEIGHT) -> str:
    """Draw one panel with its legend; `height` is the height within the axes."""
    whole = BUDGET_TOP + height + BUDGET_BELOW
    return _picture(title, width, panel.draw(0, 0, width, whole), panel.keys, whole)


def frontier_of(plan: Plan, curve: Curve) -> Panel:
    """Return a panel of a plan among the fastest known schedules for other budgets of its step, with bounds."""
    curve = curve.with_solution(plan.planned.peak_bytes, plan.solution)  # the plan's bound holds for its own peak too
    step_ms = step_time_ms(plan.graph, plan.profile) or 1.0

    def place(peak_bytes: int, extra_ms: float) -> Point:
        return plan.resident_bytes + peak_bytes, extra_ms / step_ms

    last = curve.points[-1]  # the point of most memory
    most = max(plan.unplanned.peak_bytes, last.peak_bytes)
    fastest = [place(point.peak_bytes, point.extra_ms) for point in (*curve.points, replace(last, peak_bytes=most))]
    budgets = [budget for budget, _ in curve.bounds if budget <= most and not plan.solution.offloads]
    bounds = [place(budget, curve.solution(budget).bound_ms) for budget in budgets]  # for plans without offloads
    predicted = place(plan.planned.peak_bytes, plan.planned.extra_ms)
    series = [
        Series("fastest schedule found", tuple(fastest), FOUND_DOT, FOUND_LINE, ACROSS_FIRST),
        Series(PROVEN, tuple(bounds), look=PROVEN_LINE, step=UP_FIRST),
        Series("plain training", ((plan.unplanned_peak_bytes, 0.0),), RING),
        Series("this plan, predicted", (predicted,), DOT),
    ]
    measured = plan.measured
    if measured.peak_bytes is not None and measured.overhead is not None:
        series.append(Series("this plan, measured", ((measured.peak_bytes, measured.overhead),), CROSS))
    return Panel("", tuple(series), plan.budget_bytes)


def methods_panel(title: str, points: Mapping[str, Iterable[Point]], bounds: Iterable[Point], plain: Point) -> Panel:
    """Return a panel of the points of each method, the proven bounds if there are any, and eager training."""
    series = []
    for index, (name, fitting) in enumerate(points.items()):
        colour, shape = METHOD_COLOURS[index % len(METHOD_COLOURS)], METHOD_SHAPES[index % len(METHOD_SHAPES)]
        mark = f'<path d="M{{x}} {{y}}{shape}" fill="{colour}"/>'
        look = f'stroke="{colour}" fill="none" stroke-width="1.5" opacity="0.8"'
        series.append(Series(name, tuple(sorted(fitting)), mark, look, end=(plain,)))
    series += [Series("plain training", (plain,), RING), Series(PROVEN, tuple(bounds), look=PROVEN_LINE)]
    return Panel(title, tuple(series))


def panel_of(comparison: Comparison, methods: Sequence[str], title: str, resident_bytes: int, plain: int) -> Panel:
    """Return a panel of a comparison, methods in the order of the legend; resident bytes are added to all budgets."""
    points: dict[str, list[Point]] = {method: [] for method in methods}
    for outcome in comparison.outcomes:
        if outcome.fits:
            points[outcome.method].append((resident_bytes + outcome.budget_bytes, comparison.overhead(outcome)))
    budgets = [budget for budget in reversed(comparison.budgets) if not comparison.is_impossible(budget)]
    bounds = [(resident_bytes + budget, comparison.bound_overhead(budget)) for budget in budgets]
    at_plain = (resident_bytes + plain, 0.0)
    return methods_panel(title, points, [*bounds, at_plain] if bounds else (), at_plain)
