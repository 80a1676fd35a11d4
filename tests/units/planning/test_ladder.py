"""Decisions for all sizes of code: which of them a step takes, and when others pay."""

from __future__ import annotations

import pytest

from hiremate_lightning.planning.ladder import Chosen, Ladder, Loss, fastest_that_fits
from hiremate_lightning.planning.solvers import Solution, Status
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
    assert choose(room_bytes).decisions == decisions
    assert choose(150) is None


@pytest.mark.parametrize(("room_bytes", "lost_ms"), [(1100, 0.0), (402, 15.0), (603, 0.0), (802, 20 * 200 / 800)])
def test_a_loss_is_what_the_line_to_what_is_faster_saves(room_bytes, lost_ms):
    """At half the way from the least to the middle, half of the time between them is lost."""
    candidates = (PLAIN, MIDDLE, LEAST) if room_bytes != 802 else (PLAIN, MIDDLE)
    expected = lost_ms if room_bytes != 802 else 10 * 198 / 400
    assert choose(room_bytes, candidates).lost_ms == pytest.approx(expected, abs=0.1)


def loss(ladder, lost_ms=10.0):
    return Loss(ladder, "step", room(80), Chosen(LEAST, 30.0, lost_ms))


def solution(again_ms, rung=MIDDLE, peak_bytes=80):
    return Solution("portfolio", Status.FEASIBLE, rung, again_ms, peak_bytes)


def test_a_rung_pays_once_steps_lost_more_than_it_takes():
    ladder = Ladder()
    assert [ladder.note(loss(ladder).chosen, price_ms=25.0) for _ in range(3)] == [False, False, True]
    assert ladder.solved(loss(ladder), solution(again_ms=15.0))
    assert ladder.decisions == [MIDDLE]
    assert not ladder.lost_ms


def test_each_rung_in_vain_makes_the_next_one_wait_longer():
    ladder = Ladder()
    for vain in range(3):
        lost = loss(ladder, 26.0 * 2**vain)
        assert ladder.note(lost.chosen, price_ms=25.0)
        assert not ladder.solved(lost, solution(again_ms=30.0))
        assert ladder.vain == vain + 1
    assert not ladder.note(loss(ladder, 26.0).chosen, price_ms=25.0)
    assert ladder.decisions == []


def test_only_what_fits_is_a_rung_and_least_memory_is_the_last():
    ladder = Ladder()
    assert not ladder.solved(loss(ladder), solution(again_ms=1.0, peak_bytes=81))
    assert ladder.decisions == []
    assert ladder.vain == 1
    ladder = Ladder(rungs=[MIDDLE])
    assert ladder.decisions == [MIDDLE]
    ladder.least = LEAST
    assert ladder.decisions == [MIDDLE, LEAST]
