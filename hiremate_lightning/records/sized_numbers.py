"""Numbers of a step at other sizes, from their values at a few: exact by expressions of the sizes, or near by lines.

`Expressions` serve where nothing checks a number before it counts: a number without an expression is refused, or
bounded from above. `FittedLines` serve where a real step checks the prediction, as a search for the largest batch does.
They need two samples, and one size that varies. A dimension lies on a line through its values. A measured number lies
on the line between the samples beside it. Beyond the last sample it follows the last two, by their line or, where it
grew faster than the size, by that power.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

from .expressions import Expression, Sizes, find_expression

MAX_POWER = 2.0  # of the size, that anything measured is taken to grow by

Values = tuple[int, ...]  # of a number, in each sample
Number = Callable[[Sizes], int]


class Line:
    """Values at a few sizes, and at all others.

    Args:
        sizes: Sizes, ascending, at least one; or other numbers that the values grow with.
        values: The value at each.
    """

    def __init__(self, sizes: Sequence[int], values: Sequence[float]) -> None:
        self._sizes = tuple(sizes)
        self._values = tuple(values)

    def ends(self, size: float) -> tuple[tuple[int, float], tuple[int, float]]:
        """Return the two sizes between which a size lies, or the nearest two, with the values there."""
        i = min(max(bisect_right(self._sizes, size) - 1, 0), len(self._sizes) - 2)
        return (self._sizes[i], self._values[i]), (self._sizes[i + 1], self._values[i + 1])

    def straight(self, size: float) -> float:
        """Return the value on the straight line through these two."""
        (x, low), (y, high) = self.ends(size)
        return low + (high - low) * (size - x) / (y - x)

    def whole(self, size: int) -> int:
        """Return the value on the line, for values that are whole numbers; rounded up, at least 0."""
        if len(self._sizes) == 1:
            return int(self._values[0])
        (x, low), (y, high) = ((end, int(value)) for end, value in self.ends(size))
        return max(0, -((-(low * (y - x) + (high - low) * (size - x))) // (y - x)))

    def measured(self, size: int) -> float:
        """Return a measured value: beyond the last size never less than there, and see `MAX_POWER`."""
        if len(self._sizes) == 1:
            return self._values[0]
        (x, low), (y, high) = self.ends(size)
        on_line = self.straight(size)
        if size <= y:
            return max(0.0, on_line)
        power = min(MAX_POWER, (math.log(high) - math.log(low)) / math.log(y / x)) if min(x, low, high) > 0 else 0.0
        return max(high, on_line, high * (size / y) ** power if power > 1 else 0.0)


class Expressions:
    """Numbers as expressions of the sizes of each sample."""

    is_exact = True

    def __init__(self, sizes: Sequence[Sizes]) -> None:
        self.sizes = tuple(sizes)
        self._expressions = dict[Values, Expression | None]()

    def counted(self, values: Values) -> Number | None:
        """Return the function from sizes to a number, None where it has no expression."""
        if values not in self._expressions:
            self._expressions[values] = find_expression(self.sizes, values)
        expression = self._expressions[values]
        return None if expression is None else expression.at

    measured = counted


class FittedLines:
    """Numbers on lines through those of samples, each of one size."""

    is_exact = False

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple((size,) for size in sizes)

    def counted(self, values: Values) -> Number:
        """Return the function from sizes to a whole number, such as a dimension."""
        line = self._line(values)
        return lambda sizes: line.whole(*sizes)

    def measured(self, values: Values) -> Number:
        """Return the function from sizes to a measured number."""
        line = self._line(values)
        return lambda sizes: math.ceil(line.measured(*sizes))

    def _line(self, values: Values) -> Line:
        points = sorted(zip((size for (size,) in self.sizes), values, strict=True))
        return Line(*zip(*points, strict=True))
