"""Extra time over budget as SVG pictures: a plan among what is known of its step, or a line for each method.

Methods differ much: their extra time goes up by its square root, so that one's 2 % and another's 200 % are both to be
read, and they are told apart by colour and by the shape of their marks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from html import escape

from ..planning.comparing import Comparison, Curve
from ..planning.plan import Plan, proof_words
from ..records.costs import step_time_ms
from ..units import format_ratio
from .svg_report import LINE, Key, budget_line, lay_out, open_svg, ring, stroke, ticks
from .timeline import BUDGET, COLOURS, FAINT, INK, Band, binary_unit

Point = tuple[float, float]  # bytes with resident ones, and extra time over the step's, a ratio

LEFT, RIGHT, TOP, BELOW = 52, 16, 40, 44  # pixels around a drawing
HEIGHT = 260  # pixels of the drawing of a plan
METHODS_HEIGHT = 300  # pixels of the drawing of methods
LEAST, LEAST_OF_METHODS = 0.01, 0.03  # extra time that is drawn in any case, of a plan and of methods
SPARE = 1.06  # room around the outermost values, as a factor
RATIOS = (0.0, 0.01, 0.03, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # extra times that an axis of roots names
APART = 11  # pixels at least between two extra times that it names
METHOD_COLOURS = (
    *("#4477aa", "#ee7733", "#228833", "#cc3377", "#009988", "#8c6bb1"),
    *("#b8860b", "#33bbee", "#882255", "#7f7f7f", "#66a61e", "#332288"),
)
MARKS: tuple[Callable[[float, float], str], ...] = (
    lambda x, y: f"M{x - 4} {y}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z",
    lambda x, y: f"M{x - 3.5} {y - 3.5}h7v7h-7Z",
    lambda x, y: f"M{x} {y - 5}l4.5 8h-9Z",
    lambda x, y: f"M{x} {y - 5}l5 5l-5 5l-5 -5Z",
    lambda x, y: f"M{x} {y + 5}l4.5 -8h-9Z",
)


@dataclass(frozen=True)
class BudgetAxes:
    """Budgets to the right, and extra time upwards."""

    points: tuple[Point, ...]  # all that is drawn
    least: float  # extra time that is drawn in any case, a ratio
    is_root: bool  # whether extra time goes up by its square root: 2 % and 200 % are both to be read
    edges: tuple[float, float, float, float]  # left, right, upper and lower, in pixels

    @cached_property
    def span(self) -> tuple[float, float]:
        """Budgets at the left and at the right edge."""
        budgets = [size_bytes for size_bytes, _ in self.points]
        spare = (SPARE - 1) * (max(budgets) - min(budgets)) or 1
        return min(budgets) - spare, max(budgets) + spare

    @cached_property
    def most(self) -> float:
        """Extra time at the upper edge."""
        return SPARE * max(self.least, *(extra for _, extra in self.points))

    def place(self, point: Point) -> Point:
        """Return where a point lies, in pixels."""
        (size_bytes, extra), (low, high), (left, right, top, bottom) = point, self.span, self.edges
        across, up = (size_bytes - low) / (high - low), max(0.0, extra) / self.most
        up = math.sqrt(up) if self.is_root else up
        return round(left + across * (right - left), 1), round(bottom - up * (bottom - top), 1)

    def line(self, points: Sequence[Point]) -> str:
        """Connect points."""
        return "M" + "L".join(f"{x} {y}" for x, y in map(self.place, points))

    def steps(self, points: Sequence[Point], order: str) -> str:
        """Connect points by level and upright lines, in an order."""
        (x, y), *places = map(self.place, points)
        parts = [f"M{x} {y}"]
        for x, y in places:
            parts += [f"H{x}", f"V{y}"] if order == "HV" else [f"V{y}", f"H{x}"]
        return "".join(parts)

    def draw(self) -> Iterator[str]:
        """Draw the axes."""
        left, right, top, bottom = self.edges
        for extra in self._named():
            _, y = self.place((self.span[0], extra))
            yield f'<path d="M{left} {y}H{right}" class="grid" stroke="#eceef1"/>'
            yield f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{100 * extra:g}</text>'
        scale, unit = binary_unit(int(self.span[1]))
        for tick in ticks(self.span[1] / scale, about=8):
            if tick * scale >= self.span[0]:
                x, _ = self.place((tick * scale, 0.0))
                yield f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>'
        yield f'<text x="{left}" y="{top - 8}" class="faint" fill="{FAINT}">extra time, %</text>'
        place = f'x="{(left + right) / 2:.1f}" y="{bottom + 16 + LINE}" text-anchor="middle"'
        yield f'<text {place} class="faint" fill="{FAINT}">budget, {unit}</text>'

    def _named(self) -> Iterator[float]:
        """Go through the extra times that the axis names."""
        if not self.is_root:
            yield from (percent / 100 for percent in ticks(100 * self.most))
            return
        below = math.inf
        for extra in (ratio for ratio in RATIOS if ratio <= self.most):
            _, y = self.place((self.span[0], extra))
            if below - y >= APART:
                below = y
                yield extra


# ---------------------------------------------------------------- one plan


@dataclass(frozen=True, slots=True)
class Frontier:
    """Extra time against budget: of the fastest schedules found, of what is proven, of plain training and of a plan."""

    found: tuple[Point, ...]  # from the least memory to plain training
    bounds: tuple[Point, ...]  # budgets, and the extra time below which nothing exists within them
    plain: Point
    planned: Point
    measured: Point | None


def frontier_of(plan: Plan, curve: Curve) -> Frontier:
    """Put a plan among the schedules that are known for other budgets of its step."""
    curve = curve.with_solution(plan.planned.peak_bytes, plan.solution)  # its bound was proven for at least that much
    step_ms = step_time_ms(plan.graph, plan.profile) or 1.0

    def place(peak_bytes: int, extra_ms: float) -> Point:
        return plan.resident_bytes + peak_bytes, extra_ms / step_ms

    most = max([plan.unplanned.peak_bytes, *(point.peak_bytes for point in curve.points)])
    fastest = [place(point.peak_bytes, point.extra_ms) for point in curve.points]
    fastest.append((max(fastest[-1][0], place(most, 0)[0]), fastest[-1][1]) if fastest else place(most, 0))
    bounds, best_ms = list[Point](), 0.0
    for budget, bound_ms in () if plan.solution.offloads else reversed(curve.bounds):  # of plans that offload nothing
        best_ms = max(best_ms, bound_ms)  # a bound holds for every smaller budget too
        if budget <= most:
            bounds.append(place(budget, best_ms))
    measured = plan.measured
    return Frontier(
        tuple(fastest),
        tuple(reversed(bounds)),
        (plan.unplanned_peak_bytes, 0.0),
        place(plan.planned.peak_bytes, plan.planned.extra_ms),
        None if measured.peak_bytes is None or measured.overhead is None else (measured.peak_bytes, measured.overhead),
    )


def frontier_words(plan: Plan) -> str:
    """Describe how good the plan is proven to be."""
    if plan.solution.is_plain:
        return "Nothing is recomputed: no plan is faster."
    return f"This plan: {format_ratio(plan.predicted_overhead)}, {proof_words(plan.to_dict())}."


def frontier_svg(plan: Plan, frontier: Frontier, width: int) -> str:
    """Draw a plan among the schedules that are known for other budgets."""
    marks = [(ring, "plain training", frontier.plain), (_dot, "this plan, predicted", frontier.planned)]
    if frontier.measured is not None:
        marks.append((_cross, "this plan, measured", frontier.measured))
    bottom, saved = TOP + HEIGHT, COLOURS[Band.SAVED]
    points = *frontier.found, *frontier.bounds, *(point for *_, point in marks)
    axes = BudgetAxes(points, LEAST, False, (LEFT, width - RIGHT, TOP, bottom))
    keys = [(stroke(saved), "fastest schedule found"), (stroke(FAINT), "proven: nothing is faster")]
    legend, height = lay_out([*keys, *((key, name) for key, name, _ in marks)], bottom + 2 * LINE + 8, width)
    parts = [*open_svg(width, int(height), "Extra time against budget"), *axes.draw()]
    low, high = axes.span
    if low <= plan.budget_bytes <= high:
        x, _ = axes.place((plan.budget_bytes, 0.0))
        parts.append(budget_line(f"M{x} {TOP}V{bottom}"))
    if frontier.bounds:
        parts.append(f'<path d="{axes.steps(frontier.bounds, "VH")}" class="turn" stroke="{FAINT}" {_LINE}/>')
    parts.append(f'<path d="{axes.steps(frontier.found, "HV")}" stroke="{saved}" {_LINE}/>')
    parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{saved}"/>' for x, y in map(axes.place, frontier.found)]
    parts += [key(*axes.place(point)) for key, _, point in marks]
    return "\n".join([*parts, *legend, "</svg>"])


_LINE = 'fill="none" stroke-width="2"'


def _dot(x: float, y: float) -> str:
    return f'<circle cx="{x}" cy="{y}" r="6" class="budget-key" fill="{BUDGET}"/>'


def _cross(x: float, y: float) -> str:
    return f'<path d="M{x - 6} {y - 6}l12 12m0-12l-12 12" class="peak" stroke="{INK}" stroke-width="2"/>'


# ---------------------------------------------------------------- many methods


@dataclass(frozen=True)
class Panel:
    """One step: what each method found, and what is proven."""

    title: str  # above it
    lines: tuple[tuple[str, tuple[Point, ...]], ...]  # of each method, in the order of the legend
    bounds: tuple[Point, ...]  # budgets, and the extra time below which nothing exists within them
    plain: Point

    def draw(self, left: float, top: float, width: int, height: int) -> Iterator[str]:
        """Draw it at a place and with a size, in pixels; the axes are within."""
        points = self.plain, *self.bounds, *(point for _, points in self.lines for point in points)
        edges = left + LEFT, left + width - RIGHT, top + TOP, top + height - BELOW
        axes = BudgetAxes(points, LEAST_OF_METHODS, True, edges)
        yield f'<text x="{left + LEFT}" y="{top + 16}" font-weight="600">{escape(self.title)}</text>'
        yield from axes.draw()
        if self.bounds:
            yield f'<path d="{axes.line(self.bounds)}" class="turn" stroke="{FAINT}" fill="none" stroke-width="2"/>'
        for index, (name, points) in enumerate(self.lines):
            yield from _line(index, name, points, self.plain, axes)
        yield ring(*axes.place(self.plain))


def _look(index: int) -> tuple[str, Callable[[float, float], str]]:
    return METHOD_COLOURS[index % len(METHOD_COLOURS)], MARKS[index % len(MARKS)]


def _line(index: int, name: str, points: Sequence[Point], plain: Point, axes: BudgetAxes) -> Iterator[str]:
    """Draw what a method found, from the smallest budget to plain training."""
    if not points:
        return
    colour, mark = _look(index)
    ordered = sorted(points)
    yield f'<path d="{axes.line([*ordered, plain])}" stroke="{colour}" fill="none" stroke-width="1.5" opacity="0.8"/>'
    for size_bytes, extra in ordered:
        words = escape(f"{name}: +{100 * extra:.1f} %")
        shape = mark(*axes.place((size_bytes, extra)))
        yield f'<path d="{shape}" fill="{colour}"><title>{words}</title></path>'


def legend(names: Sequence[str], top: float, width: int) -> tuple[list[str], float]:
    """Name the marks of methods, as `lay_out` does."""
    keys: list[tuple[Key, str]] = [(partial(_mark, index), name) for index, name in enumerate(names)]
    return lay_out([*keys, (ring, "plain training"), (stroke(FAINT), "proven: nothing is faster")], top, width)


def _mark(index: int, x: float, y: float) -> str:
    """Draw what stands for a method."""
    colour, mark = _look(index)
    return f'<path d="{mark(x, y)}" fill="{colour}"/>'


def panel_of(comparison: Comparison, methods: Sequence[str], title: str, resident_bytes: int, plain: int) -> Panel:
    """Put a comparison into a panel, with the methods in the order of the legend; resident bytes are added to all."""

    def fitting(method: str) -> tuple[Point, ...]:
        outcomes = (o for o in comparison.outcomes if o.method == method and o.fits)
        return tuple((resident_bytes + o.budget_bytes, comparison.overhead(o)) for o in outcomes)

    budgets = [budget for budget in reversed(comparison.budgets) if not comparison.is_impossible(budget)]
    bounds = [(resident_bytes + budget, comparison.bound_overhead(budget)) for budget in budgets]
    at_plain = (resident_bytes + plain, 0.0)
    lines = tuple((method, fitting(method)) for method in methods)
    return Panel(title, lines, (*bounds, at_plain) if bounds else (), at_plain)


def comparison_svg(panel: Panel, width: int = 760) -> str:
    """Draw one panel and its legend."""
    height = TOP + METHODS_HEIGHT + BELOW
    names, bottom = legend([name for name, _ in panel.lines], height, width)
    picture = open_svg(width, int(bottom), f"{panel.title}: extra time over budget")
    return "\n".join([*picture, *panel.draw(0, 0, width, height), *names, "</svg>\n"])
