"""Missed steps: when they are awaited again."""

from __future__ import annotations

from hiremate_lightning.sessions.missed import REMEMBERED, MissedSteps


def awaited(missed, steps, size_bytes=100):
    return [index for index in range(1, steps + 1) if missed.may_come(size_bytes)]


def test_a_step_that_stays_away_is_awaited_less_and_less_often():
    missed = MissedSteps()
    assert awaited(missed, 3) == []
    missed.miss(100)
    assert awaited(missed, 40) == [1, 2, 3, 4, 8, 16, 32]


def test_a_step_is_awaited_after_as_many_steps_as_the_last_time():
    missed = MissedSteps()
    missed.miss(100)
    awaited(missed, 11)
    missed.miss(100)
    assert awaited(missed, 12) == [1, 2, 3, 4, 8, 11]


def test_a_step_is_awaited_among_those_of_its_size_until_it_is_found():
    missed = MissedSteps()
    missed.miss(100)
    assert not awaited(missed, 3, size_bytes=200)
    assert missed.may_come(100)
    missed.found(100)
    assert not missed.may_come(100)


def test_the_sizes_missed_last_are_remembered():
    missed = MissedSteps()
    for size_bytes in range(REMEMBERED + 1):
        missed.miss(size_bytes)
    assert not missed.may_come(0)
    assert missed.may_come(1)
