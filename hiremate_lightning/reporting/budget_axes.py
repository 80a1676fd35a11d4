"""The axes of pictures that show extra time over the budget, and where a point lies on them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from .figures import FAINT, Point, binary_unit
from .svg_report import LINE, ticks

LEFT, RIGHT = 52, 16  # pixels beside the axes
SPARE = 1.06  # room around the outermost values, as a factor
RATIOS = (0.0, 0.01, 0.03, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # extra times that an axis of roots names
APART = 11  # pixels at least between two extra times that it names


@dataclass(frozen=True)
class BudgetAxes:
    """Budgets to the right, and extra time upwards.

    Attributes:
        points: All that is drawn.
        least: Extra time that is drawn in any case, a ratio.
        is_root: Whether extra time goes up by its square root: 2 % and 200 % are both to be read.
        edges: The left, right, upper and lower edge, in pixels.
    """

    points: tuple[Point, ...]
    least: float
    is_root: bool
    edges: tuple[float, float, float, float]

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
