"""Extra time against budget as an SVG picture: what was found, what is proven, and where the plan lies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..planning.plan import Plan
from .budget_axes import LEFT, RIGHT, BudgetAxes
from .figures import BUDGET, COLOURS, FAINT, INK, Frontier, Point
from .lifetimes import Band
from .svg_report import LINE, Key, lay_out, open_svg, ring, stroke

TOP, HEIGHT = 30, 260  # pixels above the drawing, and of it
LEAST = 0.01  # extra time that is drawn in any case


def frontier_svg(plan: Plan, frontier: Frontier, width: int) -> str:
    """Draw a plan among the schedules that are known for other budgets.

    Args:
        plan: The plan.
        frontier: What is known of its step.
        width: Pixels.
    """
    return _Frontier(plan, frontier, width).text()


@dataclass(frozen=True)
class _Frontier:
    plan: Plan
    frontier: Frontier
    width: int

    @cached_property
    def axes(self) -> BudgetAxes:
        frontier = self.frontier
        others = [frontier.plain, frontier.planned, *([frontier.measured] if frontier.measured else [])]
        edges = LEFT, self.width - RIGHT, TOP, TOP + HEIGHT
        return BudgetAxes((*frontier.found, *frontier.bounds, *others), LEAST, False, edges)

    def text(self) -> str:
        legend, height = lay_out(self._legend(), TOP + HEIGHT + 2 * LINE + 8, self.width)
        picture = open_svg(self.width, int(height), "Extra time against budget")
        lines = [*self.axes.draw(), *self._budget(), *self._curves(), *self._marks(), *legend]
        return "\n".join([*picture, *lines, "</svg>"])

    def _budget(self) -> Iterator[str]:
        low, high = self.axes.span
        if low <= self.plan.budget_bytes <= high:
            x, _ = self.axes.place((self.plan.budget_bytes, 0.0))
            place = f'd="M{x} {TOP}V{TOP + HEIGHT}"'
            yield f'<path {place} class="budget" stroke="{BUDGET}" stroke-width="2" stroke-dasharray="6 4"/>'

    def _curves(self) -> Iterator[str]:
        looks = 'fill="none" stroke-width="2"'
        if self.frontier.bounds:
            yield f'<path d="{self._steps(self.frontier.bounds, "VH")}" class="turn" stroke="{FAINT}" {looks}/>'
        colour = COLOURS[Band.SAVED]
        yield f'<path d="{self._steps(self.frontier.found, "HV")}" stroke="{colour}" {looks}/>'
        for x, y in map(self.axes.place, self.frontier.found):
            yield f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>'

    def _steps(self, points: Sequence[Point], order: str) -> str:
        """Connect points by level and upright lines, in an order."""
        places = [self.axes.place(point) for point in points]
        parts = [f"M{places[0][0]} {places[0][1]}"]
        for x, y in places[1:]:
            parts += [f"H{x}", f"V{y}"] if order == "HV" else [f"V{y}", f"H{x}"]
        return "".join(parts)

    def _marks(self) -> Iterator[str]:
        yield ring(*self.axes.place(self.frontier.plain))
        yield _dot(*self.axes.place(self.frontier.planned))
        if self.frontier.measured is not None:
            yield _cross(*self.axes.place(self.frontier.measured))

    def _legend(self) -> list[tuple[Key, str]]:
        named: list[tuple[Key, str]] = [
            (stroke(COLOURS[Band.SAVED]), "fastest schedule found"),
            (stroke(FAINT), "proven: nothing is faster"),
            (ring, "plain training"),
            (_dot, "this plan, predicted"),
        ]
        return [*named, (_cross, "this plan, measured")] if self.frontier.measured else named


def _dot(x: float, y: float) -> str:
    return f'<circle cx="{x}" cy="{y}" r="6" class="budget-key" fill="{BUDGET}"/>'


def _cross(x: float, y: float) -> str:
    return f'<path d="M{x - 6} {y - 6}l12 12m0-12l-12 12" class="peak" stroke="{INK}" stroke-width="2"/>'
