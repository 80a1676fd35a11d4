"""Extra time against budget as an SVG picture: what was found, what is proven, and where the plan lies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..planning.plan import Plan
from .figures import BUDGET, COLOURS, FAINT, INK, Frontier, Point, binary_unit
from .lifetimes import Band
from .svg_report import LETTER, LINE, open_svg, ticks

LEFT, RIGHT, TOP, HEIGHT = 52, 16, 30, 260  # pixels around the drawing, and its height
SPARE = 1.08  # room to the right of and above the highest values, as a factor


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
    def points(self) -> list[Point]:
        frontier = self.frontier
        others = [frontier.plain, frontier.planned, *([frontier.measured] if frontier.measured else [])]
        return [*frontier.found, *frontier.bounds, *others]

    @cached_property
    def span(self) -> tuple[float, float]:
        """Budgets at the left and at the right edge."""
        budgets = [size_bytes for size_bytes, _ in self.points]
        spare = (SPARE - 1) * (max(budgets) - min(budgets)) or 1
        return min(budgets) - spare, max(budgets) + spare

    @cached_property
    def most(self) -> float:
        """Extra time at the upper edge."""
        return SPARE * max(*(extra for _, extra in self.points), 0.01)

    def text(self) -> str:
        height = TOP + HEIGHT + 4 * LINE
        picture = open_svg(self.width, height, "Extra time against budget")
        lines = [*self._axes(), *self._curves(), *self._marks(), *self._legend(height - 12)]
        return "\n".join([*picture, *lines, "</svg>"])

    def _x(self, size_bytes: float) -> float:
        low, high = self.span
        return round(LEFT + (size_bytes - low) / (high - low) * (self.width - LEFT - RIGHT), 1)

    def _y(self, extra: float) -> float:
        return round(TOP + HEIGHT * (1 - max(0.0, extra) / self.most), 1)

    def _axes(self) -> Iterator[str]:
        for percent in ticks(100 * self.most):
            y = self._y(percent / 100)
            yield f'<path d="M{LEFT} {y}H{self.width - RIGHT}" class="grid" stroke="#eceef1"/>'
            yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{percent:g}</text>'
        scale, unit = binary_unit(int(self.span[1]))
        for tick in ticks(self.span[1] / scale, about=8):
            if tick * scale >= self.span[0]:
                x = self._x(tick * scale)
                yield f'<text x="{x}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{tick:g}</text>'
        yield f'<text x="{LEFT}" y="{TOP - 12}">extra time, %</text>'
        yield f'<text x="{self.width / 2}" y="{TOP + HEIGHT + 16 + LINE}" text-anchor="middle">budget, {unit}</text>'
        if self.span[0] <= self.plan.budget_bytes <= self.span[1]:
            place = f'd="M{self._x(self.plan.budget_bytes)} {TOP}V{TOP + HEIGHT}"'
            yield f'<path {place} class="budget" stroke="{BUDGET}" stroke-width="2" stroke-dasharray="6 4"/>'

    def _curves(self) -> Iterator[str]:
        looks = 'fill="none" stroke-width="2"'
        if self.frontier.bounds:
            yield f'<path d="{self._steps(self.frontier.bounds, "VH")}" class="turn" stroke="{FAINT}" {looks}/>'
        colour = COLOURS[Band.SAVED]
        yield f'<path d="{self._steps(self.frontier.found, "HV")}" stroke="{colour}" {looks}/>'
        for size_bytes, extra in self.frontier.found:
            yield f'<circle cx="{self._x(size_bytes)}" cy="{self._y(extra)}" r="3" fill="{colour}"/>'

    def _steps(self, points: Sequence[Point], order: str) -> str:
        """Connect points by level and upright lines, in an order."""
        places = [(self._x(size_bytes), self._y(extra)) for size_bytes, extra in points]
        parts = [f"M{places[0][0]} {places[0][1]}"]
        for x, y in places[1:]:
            parts += [f"H{x}", f"V{y}"] if order == "HV" else [f"V{y}", f"H{x}"]
        return "".join(parts)

    def _marks(self) -> Iterator[str]:
        size_bytes, extra = self.frontier.plain
        place = f'cx="{self._x(size_bytes)}" cy="{self._y(extra)}"'
        yield f'<circle {place} r="5" class="peak" fill="none" stroke="{INK}" stroke-width="2"/>'
        size_bytes, extra = self.frontier.planned
        yield f'<circle cx="{self._x(size_bytes)}" cy="{self._y(extra)}" r="6" class="budget-key" fill="{BUDGET}"/>'
        if self.frontier.measured is not None:
            x, y = self._x(self.frontier.measured[0]), self._y(self.frontier.measured[1])
            yield f'<path d="M{x - 6} {y - 6}l12 12m0-12l-12 12" class="peak" stroke="{INK}" stroke-width="2"/>'

    def _legend(self, y: int) -> Iterator[str]:
        named = [
            ("\u2501", COLOURS[Band.SAVED], "", "fastest schedule found"),
            ("\u2501", FAINT, "faint", "proven: nothing is faster"),
            ("\u25cb", INK, "", "plain training"),
            ("\u25cf", BUDGET, "budget-key", "this plan, predicted"),
        ]
        named += [("\u2715", INK, "", "this plan, measured")] if self.frontier.measured else []
        x = float(LEFT)
        for mark, colour, kind, name in named:
            looks = f' class="{kind}" fill="{colour}"' if colour != INK else ""
            yield f'<text x="{x:.1f}" y="{y}"><tspan{looks}>{mark}</tspan> {name}</text>'
            x += 34 + LETTER * len(name)
