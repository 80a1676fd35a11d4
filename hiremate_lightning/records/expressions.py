"""Numbers of a step at other sizes, from their values at traced sizes: exact by expressions, or near by lines.

Shapes of views, strides and bytes are constants, or a factor times a product of up to three sizes, plus a constant. Two
samples are not enough: `length * length` at 40 and 46 lies on a line too. If several expressions have the same values
at all samples, none of them counts: the number is refused, or bounded from above. Quotients are no expressions, because
they take few values: `length // 3` is 13, 15 and 19 at 40, 46 and 59, and so is `2 * ceil(length / 8) + 3`. The code
that captures a step finds its quotients, and passes them as additional sizes. Lines need two samples and one size that
varies. They are used if a real step checks the prediction, as in a search for the largest batch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

from ..errors import HiRemateError

Sizes = tuple[int, ...]
Values = tuple[int, ...]  # the values of a number in the samples
Number = Callable[[Sizes], int]

LEAST_SAMPLES = 3  # two samples find an expression, the third one checks it
LEAST_SAMPLES_OF_TWO_TERMS = 4  # more, because there are more expressions of two terms
MOST_FACTORS = 3
MAX_POWER = 2.0  # beyond its samples, a measured number grows at most with this power of the size
BITS = {0, 1}


class SizesDifferError(HiRemateError):
    """The same code at several sizes differs in more than numbers that are expressions of the sizes."""


class WrongAtSizesError(SizesDifferError):
    """Programs for sizes that were not traced gave other numbers than eager PyTorch."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A factor times a product of sizes, plus a constant, which may be multiplied by some of these sizes."""

    factor: int
    dimensions: tuple[int, ...]  # positions of the sizes in the product, ascending, once for each power
    constant: int = 0  # the number that is added
    # Positions of the sizes that multiply the constant: in `8 * batch * (length + 1)`, the batch.
    of_constant: tuple[int, ...] = ()

    def at(self, sizes: Sizes) -> int:
        """Return the number at these sizes."""
        constant = self.constant * math.prod(sizes[d] for d in self.of_constant)
        return self.factor * math.prod(sizes[d] for d in self.dimensions) + constant

    def source(self, names: Sequence[str]) -> str:
        """Return the expression as Python source, with these names of the sizes."""
        if not self.dimensions:
            return str(self.factor + self.constant)
        product, constant = (
            "*".join((str(factor), *(names[d] for d in dimensions)))
            for factor, dimensions in ((self.factor, self.dimensions), (self.constant, self.of_constant))
        )
        return f"{product}+{constant}" if self.constant else product


def expression_of(samples: Sequence[Sizes], values: Sequence[int], what: str = "a number") -> Expression:
    """Return the only expression with these values at the samples.

    Raises:
        SizesDifferError: If there is none.
    """
    expression = find_expression(samples, values)
    if expression is None:
        raise SizesDifferError(f"At the sizes {samples} {what} is {values}, which is no expression of them")
    return expression


def exactly(samples: Sequence[Sizes], values: Values, is_measured: bool) -> Number | None:
    """Return the function from sizes to a number, by its expression; None if it has none."""
    expression = find_expression(samples, values)
    return None if expression is None else expression.at


def on_line(samples: Sequence[Sizes], values: Values, is_measured: bool) -> Number:
    """Return the function from one size to a number on the line through its values, see `Line`."""
    line = Line(*zip(*sorted(zip((size for (size,) in samples), values, strict=True)), strict=True))
    return lambda sizes: math.ceil(line.measured(*sizes)) if is_measured else line.whole(*sizes)


def find_expression(samples: Sequence[Sizes], values: Sequence[int]) -> Expression | None:
    """Return the only expression with these values at the samples; None if there is none, or more than one."""
    if len(set(values)) == 1:
        return Expression(0, (), values[0])
    candidates = [
        Expression(factor, dimensions, constant)
        for dimensions, products in _products(samples)
        for factor, constant in _line_through(products, values)
    ] or list(_candidates_of_two_terms(samples, values))
    return candidates[0] if len(candidates) == 1 else None


def _products(samples: Sequence[Sizes]) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """Yield the products of sizes, with their values; no powers of a size that is 0 or 1 in all samples."""
    bits = {d for d, column in enumerate(zip(*samples, strict=True)) if set(column) <= BITS}
    for count in range(1, MOST_FACTORS + 1):
        for dimensions in combinations_with_replacement(range(len(samples[0])), count):
            if any(dimensions.count(d) > 1 for d in bits):
                continue
            yield dimensions, [math.prod(sample[d] for d in dimensions) for sample in samples]


def _candidates_of_two_terms(samples: Sequence[Sizes], values: Sequence[int]) -> Iterator[Expression]:
    """Yield the expressions with these values in which a constant is added to one size of a product."""
    if len(samples) < LEAST_SAMPLES_OF_TWO_TERMS:
        return
    for dimensions, _ in _products(samples):
        for place, shifted in enumerate(dimensions):
            rest = dimensions[:place] + dimensions[place + 1 :]
            if not rest or shifted in dimensions[:place]:
                continue
            scales = [math.prod(sample[d] for d in rest) for sample in samples]
            if 0 in scales or any(value % scale for value, scale in zip(values, scales, strict=True)):
                continue
            quotients = [value // scale for value, scale in zip(values, scales, strict=True)]
            line = _line_through([sample[shifted] for sample in samples], quotients)
            yield from (Expression(factor, dimensions, constant, rest) for factor, constant in line if factor)


def vary_alone(samples: Sequence[Sizes], sizes: Sizes) -> tuple[list[Sizes], Sizes]:
    """Remove the sizes that never vary in the samples, and those that are a multiple of another size plus a constant.

    Of a size and its half the half stays, because the size is a multiple of it. Returns the remaining sizes of the
    samples, and those of `sizes`.

    Raises:
        SizesDifferError: If a removed size in `sizes` does not have the value that the samples imply.
    """
    columns = list(zip(*samples, strict=True))
    kept = list[int]()
    for index in sorted(range(len(columns)), key=lambda index: max(columns[index]) - min(columns[index])):
        column, size = columns[index], sizes[index]
        if len(set(column)) == 1:
            expected = {column[0]}
        elif set(column) == BITS:  # such a size equals its square, see `_products`
            kept.append(index)
            expected = {size} & BITS or {0}
        else:
            lines = ((first, _line_through(columns[first], column)) for first in kept)
            expected = {factor * sizes[first] + constant for first, line in lines for factor, constant in line}
            if not expected:
                kept.append(index)
        if expected not in (set(), {size}):
            raise SizesDifferError(f"Sizes that did not vary, or not by themselves, in {samples}, differ in {sizes}")
    kept.sort()
    return [tuple(sample[i] for i in kept) for sample in samples], tuple(sizes[i] for i in kept)


def _line_through(sizes: Sequence[int], values: Sequence[int]) -> list[tuple[int, int]]:
    """Return the integer factor and the constant of the line through sizes and values; an empty list if none."""
    (low, least), *_, (high, most) = sorted(zip(sizes, values, strict=True))
    if low == high:
        return []
    factor, remainder = divmod(most - least, high - low)
    constant = least - factor * low
    pairs = zip(sizes, values, strict=True)
    is_line = not remainder and all(factor * size + constant == value for size, value in pairs)
    return [(factor, constant)] if is_line else []


class Line:
    """Predicts a value at any size (or other number that it grows with) from its values at a few ascending sizes.

    A measured value lies on the line between the two nearest samples. Beyond the last sample it follows the line
    through the last two or, if it grew faster than the size, their power of the size.
    """

    def __init__(self, sizes: Sequence[int], values: Sequence[float]) -> None:
        self._sizes = tuple(sizes)
        self._values = tuple(values)

    def ends(self, size: float) -> tuple[tuple[int, float], tuple[int, float]]:
        """Return the two sampled sizes around a size, or the nearest two, with the values there."""
        i = min(max(bisect_right(self._sizes, size) - 1, 0), len(self._sizes) - 2)
        return (self._sizes[i], self._values[i]), (self._sizes[i + 1], self._values[i + 1])

    def whole(self, size: int) -> int:
        """Return the value of an integer on the line, rounded up, at least 0."""
        if len(self._sizes) == 1:
            return int(self._values[0])
        (x, low), (y, high) = ((end, int(value)) for end, value in self.ends(size))
        return max(0, -((-(low * (y - x) + (high - low) * (size - x))) // (y - x)))

    def measured(self, size: float) -> float:
        """Return a measured value; beyond the last size it does not fall, and grows up to `MAX_POWER`."""
        if len(self._sizes) == 1:
            return self._values[0]
        (x, low), (y, high) = self.ends(size)
        on_line = low + (high - low) * (size - x) / (y - x)
        if size <= y:
            return max(0.0, on_line)
        is_faster = min(x, low) > 0 and high * x > low * y  # whether the value grows faster than the size
        power = min(MAX_POWER, math.log(high / low) / math.log(y / x)) if is_faster else 0.0
        return max(high, on_line, high * (size / y) ** power if is_faster else 0.0)
