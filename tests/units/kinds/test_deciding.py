"""What becomes of the plan of a kind of step, as tables."""

from __future__ import annotations

import pytest

from hiremate_lightning.kinds.deciding import (
    CORRECTIONS,
    Decision,
    decide_beside,
    decide_first,
    decide_measured,
)


@pytest.mark.parametrize(
    ("is_worth_it", "has_place", "decision"),
    [
        (False, True, Decision.KEEP),
        (False, False, Decision.KEEP),
        (True, True, Decision.FIRST),
        (True, False, Decision.FULL),
    ],
)
def test_a_kind_gets_its_first_plan_if_it_comes_again_and_there_is_place(is_worth_it, has_place, decision):
    assert decide_first(is_worth_it, has_place) is decision


@pytest.mark.parametrize(
    ("stays", "is_risen", "recomputes", "decision"),
    [
        (True, False, True, Decision.KEEP),
        (False, False, False, Decision.LESS_ROOM),
        (False, True, True, Decision.LESS_ROOM),
        (True, True, False, Decision.KEEP),  # more room is of no use
        (True, True, True, Decision.MORE_ROOM),
    ],
)
def test_a_plan_stays_if_it_fits_and_its_budget_did_not_rise(stays, is_risen, recomputes, decision):
    assert decide_beside(stays, is_risen, recomputes) is decision


@pytest.mark.parametrize(
    ("excess_bytes", "is_least", "corrections", "decision"),
    [
        (0, False, 0, Decision.KEEP),
        (1, False, 0, Decision.ABOVE_BUDGET),
        (1, True, 0, Decision.KEEP),  # no plan takes less
        (1, False, CORRECTIONS - 1, Decision.ABOVE_BUDGET),
        (1, False, CORRECTIONS, Decision.HOPELESS),
    ],
)
def test_a_plan_measured_above_its_budget_is_made_anew_at_most_three_times(
    excess_bytes, is_least, corrections, decision
):
    assert decide_measured(excess_bytes, is_least, corrections) is decision
