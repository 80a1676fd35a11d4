"""Decisions for all sizes of code: which of them a step takes."""

from __future__ import annotations

import pytest

from hiremate_lightning.planning.ladder import Ladder, fastest_that_fits
from tests.tiny import room

PLAIN, MIDDLE, LEAST = ((),), ((1,),), ((1, 2),)
PEAKS, TIMES_MS = {PLAIN: 1000, MIDDLE: 600, LEAST: 200}, {PLAIN: 0.0, MIDDLE: 10.0, LEAST: 40.0}


class Costs:
    """A step of known peaks and times."""

    peak_bytes = staticmethod(PEAKS.__getitem__)
    again_ms = staticmethod(TIMES_MS.__getitem__)


def choose(room_bytes, candidates=(LEAST, PLAIN, MIDDLE)):
    return fastest_that_fits(Costs(), room(room_bytes), candidates)


@pytest.mark.parametrize(("room_bytes", "decisions"), [(1100, PLAIN), (1000, MIDDLE), (700, MIDDLE), (300, LEAST)])
def test_the_fastest_that_fits_is_taken_and_leaves_a_guard(room_bytes, decisions):
    assert choose(room_bytes) == decisions
    assert choose(150) is None


def test_least_memory_is_the_last_of_a_ladder():
    ladder = Ladder(rungs=[MIDDLE])
    assert ladder.decisions == [MIDDLE]
    ladder.least = LEAST
    assert ladder.decisions == [MIDDLE, LEAST]
