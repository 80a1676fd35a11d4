"""What a session warns of."""

from __future__ import annotations

import pytest

from hiremate_lightning.sessions.messages import PLANNING, RETAINING, Messages
from tests.exact import recorded


def warn_at(counts: list[int]) -> list[int]:
    """List the steps that begin with a message, from the number of graphs retained at each."""
    messages, found = Messages("Net"), []
    for step, count in enumerate(counts):
        with recorded() as warned:
            messages.count_retained(count)
        found += [step] * ("more graphs retained" in "".join(warned))
    return found


def test_graphs_that_are_retained_ever_more_are_warned_of_once():
    assert warn_at([0, *range(1, 3 * RETAINING)]) == [RETAINING]
    assert not warn_at([1, 2, 3, 3, 4, 5, 6, 0, 1, 1, 1, 1, 1]), "retained from step to step"


def test_bytes_are_added_where_peak_and_budget_read_the_same():
    with pytest.warns(match=r"the budget of 3\.00 MiB: .* least memory found, 3\.00 MiB, 50 B more\.$"):
        Messages("Net").least(3 * 2**20 + 50, 3 * 2**20)
    with pytest.warns(match=r"the budget of 2\.00 MiB: .* least memory found, 3\.00 MiB\.$"):
        Messages("Net").least(3 * 2**20, 2 * 2**20)


def slow_at(shares: list[float], step_s: list[float] | None = None) -> list[int]:
    """List the steps after which a warning names slow planning, by its share of the time of each."""
    messages, found, planned_s = Messages("Net"), [], 0.0
    for step, (share, taken_s) in enumerate(zip(shares, step_s or [2.0] * len(shares), strict=True)):
        planned_s += taken_s * share
        with recorded() as texts:
            messages.step_took(taken_s, planned_s)
        assert all(f"Of the time of the latest {PLANNING} steps it took " in text for text in texts)
        found += [step] * ("Planning still takes" in "".join(texts))
    return found


def test_steps_that_are_all_planned_anew_are_warned_of_once():
    """A few that need no planning, since a size has come again, change nothing."""
    assert slow_at([0.9, *[0.5, 0.4, 0.3, 0.3, 0.5, 0.0] * PLANNING]) == [PLANNING - 1]


@pytest.mark.parametrize("learning", [1, PLANNING // 3, 2 * PLANNING // 3])
def test_steps_that_learn_at_first_are_not_warned_of(learning):
    assert not slow_at([0.99] * learning + [0.02, 0.0, 0.2] * PLANNING)


def test_a_few_steps_that_take_most_of_the_time_are_warned_of():
    """One step in eight is planned anew, and takes twenty times as long as the others: three times plain's time."""
    few, long = [0.95, *[0.0] * 7] * PLANNING, [20.0, *[1.0] * 7] * PLANNING
    assert slow_at(few, long) == [2 * PLANNING]


def test_a_few_long_steps_cause_no_warning_once_rare():
    """A first plan takes as long as many steps, and so does one that comes now and then."""
    rare = ([0.95] * 8 + [0.0] * (PLANNING - 8)) + ([0.9] + [0.0] * (PLANNING - 1)) * 4
    assert not slow_at(rare, [20.0] * 8 + [1.0] * (len(rare) - 8))
