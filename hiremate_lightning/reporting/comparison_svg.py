"""Extra time over budget as an SVG picture, a line for each method; a panel of it can stand beside others.

Extra time goes up by its square root: one method's 2 % and another's 200 % are both to be read. Methods are told apart
by colour and by the shape of their marks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape

from ..planning.comparing import Comparison
from .budget_axes import LEFT, RIGHT, BudgetAxes
from .figures import FAINT, Point
from .svg_report import Key, lay_out, open_svg, ring, stroke

TOP, BELOW = 40, 44  # pixels above and below the drawing
HEIGHT = 300  # pixels of the drawing
LEAST = 0.03  # extra time that is drawn in any case
COLOURS = (
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
class Panel:
    """One step: what each method found, and what is proven.

    Attributes:
        title: What is written above it.
        lines: For each method, budgets and extra times, a ratio; in the order of the legend.
        bounds: Budgets, and the extra time below which nothing exists within them.
        plain: Plain training.
    """

    title: str
    lines: tuple[tuple[str, tuple[Point, ...]], ...]
    bounds: tuple[Point, ...]
    plain: Point

    def draw(self, left: float, top: float, width: int, height: int) -> Iterator[str]:
        """Draw it.

        Args:
            left: Pixels to the left of the panel.
            top: Pixels above it.
            width: Its width with axes, in pixels.
            height: The same of its height.
        """
        points = self.plain, *self.bounds, *(point for _, points in self.lines for point in points)
        edges = left + LEFT, left + width - RIGHT, top + TOP, top + height - BELOW
        axes = BudgetAxes(points, LEAST, True, edges)
        yield f'<text x="{left + LEFT}" y="{top + 16}" font-weight="600">{escape(self.title)}</text>'
        yield from axes.draw()
        if self.bounds:
            yield f'<path d="{axes.line(self.bounds)}" class="turn" stroke="{FAINT}" fill="none" stroke-width="2"/>'
        for index, (name, points) in enumerate(self.lines):
            yield from _line(index, name, points, self.plain, axes)
        yield ring(*axes.place(self.plain))


def _look(index: int) -> tuple[str, Callable[[float, float], str]]:
    return COLOURS[index % len(COLOURS)], MARKS[index % len(MARKS)]


def _line(index: int, name: str, points: Sequence[Point], plain: Point, axes: BudgetAxes) -> Iterator[str]:
    """Draw what a method found, from the smallest budget to plain training."""
    if not points:
        return
    colour, mark = _look(index)
    found = sorted(points)
    yield f'<path d="{axes.line([*found, plain])}" stroke="{colour}" fill="none" stroke-width="1.5" opacity="0.8"/>'
    for size_bytes, extra in found:
        words = escape(f"{name}: +{100 * extra:.1f} %")
        shape = mark(*axes.place((size_bytes, extra)))
        yield f'<path d="{shape}" fill="{colour}"><title>{words}</title></path>'


def legend(names: Sequence[str], top: float, width: int) -> tuple[list[str], float]:
    """Name the marks, in rows.

    Args:
        names: The methods.
        top: Pixels above it.
        width: Pixels that it may take.

    Returns:
        The drawing, and the pixels above what comes below it.
    """
    keys: list[tuple[Key, str]] = [(partial(_mark, index), name) for index, name in enumerate(names)]
    return lay_out([*keys, (ring, "plain training"), (stroke(FAINT), "proven: nothing is faster")], top, width)


def _mark(index: int, x: float, y: float) -> str:
    """Draw what stands for a method."""
    colour, mark = _look(index)
    return f'<path d="{mark(x, y)}" fill="{colour}"/>'


def panel_of(comparison: Comparison, methods: Sequence[str], title: str, resident_bytes: int, plain: int) -> Panel:
    """Put a comparison into a panel; budgets are drawn with what is resident.

    Args:
        comparison: What is done.
        methods: The methods, in the order of the legend.
        title: What to write above it.
        resident_bytes: Bytes that exist before the step.
        plain: Peak of plain training above these.
    """

    def found(method: str) -> tuple[Point, ...]:
        mine = (o for o in comparison.outcomes if o.method == method and o.fits)
        return tuple((resident_bytes + o.budget_bytes, comparison.overhead(o)) for o in mine)

    budgets = [budget for budget in reversed(comparison.budgets) if not comparison.is_impossible(budget)]
    bounds = [(resident_bytes + budget, comparison.bound_overhead(budget)) for budget in budgets]
    at_plain = (resident_bytes + plain, 0.0)
    lines = tuple((method, found(method)) for method in methods)
    return Panel(title, lines, (*bounds, at_plain) if bounds else (), at_plain)


def comparison_svg(panel: Panel, width: int = 760) -> str:
    """Draw one panel and its legend."""
    height = TOP + HEIGHT + BELOW
    names, bottom = legend([name for name, _ in panel.lines], height, width)
    picture = open_svg(width, int(bottom), f"{panel.title}: extra time over budget")
    return "\n".join([*picture, *panel.draw(0, 0, width, height), *names, "</svg>\n"])
