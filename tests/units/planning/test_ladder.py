"""Decisions for all sizes of code: which of them a step takes, and when others pay."""

from __future__ import annotations

import pytest

from hiremate_lightning.planning.ladder import Ladder, Loss, fastest_that_fits
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


def loss(ladder, lost_ms=10.0, plain_bytes=100):
    return Loss(ladder, f"step of {plain_bytes}", room(80), plain_bytes, 30.0, lost_ms)


def solution(again_ms, rung=MIDDLE, peak_bytes=80):
    return Solution("portfolio", Status.FEASIBLE, rung, again_ms, peak_bytes)


def test_a_rung_pays_once_steps_lost_more_than_it_takes():
    ladder = Ladder()
    targets = [ladder.note(loss(ladder), price_ms=25.0) for _ in range(3)]
    assert targets[:2] == [None, None]
    assert targets[2].step == "step of 100"
    assert ladder.solved(targets[2], solution(again_ms=15.0))
    assert ladder.decisions == [MIDDLE]
    assert not ladder.losses
    assert not ladder.lost_ms


def test_a_rung_is_solved_for_the_size_that_saves_most():
    """That of 200 serves all three; that of 300 loses so little that it is not worth it."""
    ladder = Ladder()
    noted = [(4.0, 100), (3.0, 200), (0.5, 300)]
    target = [ladder.note(loss(ladder, *one), price_ms=7.2) for one in noted][-1]
    assert target.plain_bytes == 200


def test_each_rung_in_vain_makes_the_next_one_wait_longer():
    ladder = Ladder()
    for vain in range(3):
        target = ladder.note(loss(ladder, 26.0 * 2**vain), price_ms=25.0)
        assert target is not None
        assert not ladder.solved(target, solution(again_ms=30.0))
        assert ladder.vain == vain + 1
    assert ladder.note(loss(ladder, 26.0), price_ms=25.0) is None
    assert ladder.decisions == []


def test_what_does_not_fit_is_no_rung_and_the_least_memory_the_last():
    ladder = Ladder()
    assert not ladder.solved(loss(ladder), solution(again_ms=1.0, peak_bytes=81))
    assert ladder.decisions == []
    assert ladder.vain == 1
    ladder = Ladder(rungs=[MIDDLE])
    assert ladder.decisions == [MIDDLE]
    ladder.least = LEAST
    assert ladder.decisions == [MIDDLE, LEAST]
