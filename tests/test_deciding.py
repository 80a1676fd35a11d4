"""What becomes of the plan of a kind of step, as a table."""

from __future__ import annotations

import pytest

from hiremate_lightning.sessions.deciding import CORRECTIONS, Action, Decision, Evidence, Reason, decide

NEW = {"has_plan": False}
KEPT = Decision(Action.KEEP)


@pytest.mark.parametrize(
    ("known", "decision"),
    [
        (NEW, KEPT),
        ({**NEW, "has_place": False}, KEPT),
        ({**NEW, "is_worth_a_plan": True}, Decision(Action.REPLAN, Reason.FIRST)),
        ({**NEW, "is_worth_a_plan": True, "has_place": False}, Decision(Action.REFUSE, Reason.FIRST)),
        ({}, KEPT),
        ({"stays": False}, Decision(Action.REPLAN, Reason.LESS_ROOM)),
        ({"stays": False, "is_risen": True, "recomputes": True}, Decision(Action.REPLAN, Reason.LESS_ROOM)),
        ({"is_risen": True}, KEPT),  # more room is of no use
        ({"is_risen": True, "recomputes": True}, Decision(Action.REPLAN, Reason.MORE_ROOM)),
        ({"excess_bytes": 0}, KEPT),
        ({"excess_bytes": 1}, Decision(Action.REPLAN, Reason.ABOVE_BUDGET)),
        ({"excess_bytes": 1, "is_least": True}, KEPT),  # no plan takes less
        ({"excess_bytes": 1, "corrections": CORRECTIONS - 1}, Decision(Action.REPLAN, Reason.ABOVE_BUDGET)),
        ({"excess_bytes": 1, "corrections": CORRECTIONS}, Decision(Action.REFUSE, Reason.ABOVE_BUDGET)),
    ],
)
def test_a_plan_is_kept_replaced_or_refused_with_its_reason(known, decision):
    assert decide(Evidence(**known)) == decision
