"""Sizes of calls: those that vary from call to call, and those of calls to come where all code has templates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..capturing.capture import Captured
from ..housekeeping import Latest
from ..records.costs import Profile
from ..records.expressions import LEAST_SAMPLES, NoTemplateError, Sizes, find_expression, vary_alone

log = logging.getLogger("hiremate_lightning")

MOST_SEEN = 16  # different shapes of what one call was given


class VaryingSizes:
    """The sizes of the latest call of a model that differ from call to call, once three calls have differed.

    Args:
        weights: Returns the shapes of the model's weights. A dimension that always has a size that varies elsewhere
            can't be told from that one: such a size is left out.
    """

    def __init__(self, weights: Callable[[], Iterable[Sizes]]) -> None:
        self._weights = weights
        self._seen: dict[tuple[object, ...], list[Sizes]] = {}  # different sizes of each call, by its name and ranks
        self._varied = set[int]()  # of the latest call

    def called(self, name: str, shapes: Sequence[Sizes]) -> None:
        """Add a call, with the shapes of its arguments."""
        sizes = tuple(size for shape in shapes for size in shape)
        seen = self._seen.setdefault((name, *map(len, shapes)), [])
        if sizes not in seen and len(seen) < MOST_SEEN:
            seen.append(sizes)
        columns = list(zip(*seen, sizes, strict=True)) if len(seen) > 2 else []
        fixed = {column[-1] for column in columns if len(set(column)) == 1}
        self._varied = {column[-1] for column in columns} - fixed

    def __iter__(self) -> Iterator[int]:
        """Go through the sizes."""
        return iter(self._varied.difference(*self._weights()))


class SizesOfCalls:
    """The sizes of all calls of the steps of one code, by those of the first call: learned from steps that ran."""

    def __init__(self) -> None:
        self._calls: tuple[Captured, ...] = ()  # of the latest step
        self._sizes = Latest[Sizes, tuple[Sizes, ...]](8)  # of the latest steps, by those of the first call

    def note(self, calls: Sequence[Captured]) -> None:
        """Learn of the calls of a step that has ended."""
        if not calls or any(call.template is None for call in calls):
            return
        if [call.template for call in calls] != [call.template for call in self._calls]:
            self._sizes.clear()  # of other traces
        self._calls = tuple(calls)
        self._sizes[calls[0].sizes] = tuple(call.sizes for call in calls)

    def foresee(self, begun: Sequence[Captured]) -> list[tuple[Captured, Profile]]:
        """Return the calls to come of a step, with their costs; none where their sizes are not known for sure."""
        count = len(begun)
        if len(self._sizes) < LEAST_SAMPLES or any(
            call.template is not before.template for call, before in zip(begun, self._calls, strict=False)
        ):
            return []
        try:
            samples, first = vary_alone(list(self._sizes), begun[0].sizes)
            columns = list(zip(*self._sizes.values(), strict=True))[count:]
            return [
                _at(call, [_number(samples, values, first) for values in zip(*sizes, strict=True)])
                for call, sizes in zip(self._calls[count:], columns, strict=True)
            ]
        except NoTemplateError as error:
            log.debug("The sizes of a step to come are not known: %s", error)
            return []


def _at(call: Captured, sizes: Sequence[int]) -> tuple[Captured, Profile]:
    assert call.template is not None, "asked of calls that are made from a template"
    return call.template.at(tuple(sizes))


def _number(samples: Sequence[Sizes], values: Sequence[int], sizes: Sizes) -> int:
    expression = find_expression(samples, values)
    if expression is None:
        raise NoTemplateError(f"At the sizes {samples} another call has the size {values}")
    return expression.at(sizes)
