"""Sizes of the later calls of a step, from those of the first."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hiremate_lightning.capturing.code_at_sizes import SizesOfCalls
from hiremate_lightning.sessions.largest import VaryingSizes


class Code:
    """Returns its name and the sizes that it is asked for, in place of code and costs."""

    def __init__(self, name: str) -> None:
        self.name = name

    def at(self, sizes: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        return self.name, sizes


FIRST, SECOND = Code("first"), Code("second")


def step(length: int, *second: int, made_from: Code | None = SECOND) -> list[SimpleNamespace]:
    return [SimpleNamespace(made_from=FIRST, sizes=(length, 4)), SimpleNamespace(made_from=made_from, sizes=second)]


def learned(*steps: list[SimpleNamespace]) -> SizesOfCalls:
    sizes = SizesOfCalls()
    for calls in steps:
        sizes.note(calls)
    return sizes


THREE = step(40, 39), step(46, 45), step(59, 58)
FORESEEN = {
    "three steps": ((step(40, 39, 160), step(46, 45, 184), step(59, 58, 236)), [("second", (99, 400))]),
    "two steps": (THREE[:2], []),
    "sizes that do not follow, as those of a decoder": ((step(40, 7), step(46, 31), step(59, 12)), []),
    "other traces": ((*THREE, step(61, 60, made_from=Code("new"))), []),
    "traced calls": ((step(40, 39, made_from=None),), []),
    "a step that ends before its first call, as pieces of a pipeline do": ((*THREE, []), [("second", (99,))]),
}


@pytest.mark.parametrize(("steps", "foreseen"), FORESEEN.values(), ids=FORESEEN)
def test_three_steps_alike_determine_the_sizes_of_later_calls(steps, foreseen):
    assert learned(*steps).foresee(step(100)[:1]) == foreseen


def test_what_never_varied_must_not_vary():
    assert learned(*THREE).foresee([SimpleNamespace(made_from=FIRST, sizes=(100, 8))]) == []


def test_sizes_vary_that_differ_once_three_calls_have_differed():
    varying = VaryingSizes(lambda: [(96, 3)])
    found = []
    for height, width in ((64, 80), (48, 112), (112, 80), (96, 80), (64, 4)):
        varying.called("net", [(4, 3, height, width)])
        found.append(set(varying))
    assert found == [set(), set(), {112, 80}, {80}, {64}], "96 is a width of the model too, and 4 the number of rows"


def test_sizes_of_calls_of_another_form_are_not_compared():
    varying = VaryingSizes(list)
    for length in (5, 6, 7):
        varying.called("net", [(2, length)])
        varying.called("net", [(2, 9), (length,)])
    assert set(varying) == {7}
