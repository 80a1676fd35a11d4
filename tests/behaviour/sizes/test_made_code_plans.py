"""Which decisions steps of sizes run by that were never traced: made once for all sizes, and never over budget."""

from __future__ import annotations

import pytest
import torch

from hiremate_lightning import HiRemateWarning, InfeasibleBudgetError
from hiremate_lightning.records.expressions import SizesDifferError
from hiremate_lightning.sessions import offloading
from hiremate_lightning.testing import is_from_other_sizes, plans, session_of, step_under_way
from tests.behaviour.sizes.test_made_code import FIRST, LONG, SHORT, Training, budget_of, train_alike, trainings
from tests.exact import Log, differing

pytestmark = pytest.mark.usefixtures("made_code_at_once")
LONGER = [96, 101, 99, 107, 94]  # than all that is planned
TIGHT, LONGEST = 0.34, 127  # the least memory of the longest takes 1.15 times that share of what the first length adds


def with_code(share: float = 0.75, **options: object) -> tuple[Training, Training, int]:
    """Make trainings of which the planned one has code for all sizes as the next new size comes."""
    torch._dynamo.reset()
    plain, planned, added_bytes = trainings(share, **options)
    train_alike(plain, planned, FIRST, FIRST, SHORT, LONG)
    return plain, planned, added_bytes


def take_steps(training: Training, count: int, length: int) -> list[Log]:
    return [training.step(length) for _ in range(count)]


def rungs_of(planned: Training) -> int:
    """Return how many decisions were solved for all sizes."""
    return sum(len(kind.ladder.rungs) for kind in session_of(planned.model).model.history)


@pytest.mark.filterwarnings("error")
def test_larger_sizes_run_by_decisions_made_once(planning_log):
    """The plan of the first length fits none of them: the first one is solved for, and all run by what it finds."""
    plain, planned, added_bytes = with_code()
    planning_log.texts.clear()
    for length in [*LONGER, *LONGER]:
        train_alike(plain, planned, length)
        assert is_from_other_sizes(planned.model)
        assert step_under_way(planned.model).modes == ("plan of another step",)
        assert planned.peak_bytes <= added_bytes
    assert len(planning_log.of("planning")) == rungs_of(planned) == 1
    assert len(plans(planned.model)) == 1  # no size got one of its own


def test_beyond_max_plans_larger_sizes_run_at_the_least_memory(planning_log):
    """The least memory is searched once, without a message: no size waits for a plan of its own."""
    plain, planned, added_bytes = with_code(max_plans=1)
    for length in LONGER:
        train_alike(plain, planned, length)
        assert planned.peak_bytes <= added_bytes
    assert len(planning_log.of("searching for the least memory at all sizes")) == 1
    assert rungs_of(planned) == 0


def test_a_size_that_nothing_fits_is_refused_as_before():
    """Not even its least memory fits: the error names a budget that is enough."""
    _, planned, _ = with_code(TIGHT, time_limit_s=1.0)
    with pytest.raises(InfeasibleBudgetError, match="too small for SmallGPT") as caught:
        take_steps(planned, 12, LONGEST)
    assert caught.value.smallest_bytes > budget_of(FIRST, TIGHT)[0]


@pytest.mark.filterwarnings("ignore:The first step of another signature")
@pytest.mark.parametrize("verify", ["first", "off"])
def test_a_size_that_nothing_fits_is_announced_where_it_runs(verify: str):
    """It runs by what is decided for all sizes at first; a proof finds memory by offloading what autograd saves."""
    plain, planned, _ = with_code(TIGHT, time_limit_s=1.0, on_infeasible="warn", verify=verify)
    with pytest.warns(HiRemateWarning, match="Nothing fits the budget"):
        logs = take_steps(planned, 3, LONGEST)
    assert all(differing(log, plain.step(LONGEST)) == [] for log in logs)
    assert is_from_other_sizes(planned.model)


def test_a_plan_is_dropped_if_its_programs_can_not_be_made(monkeypatch: pytest.MonkeyPatch):
    """Nothing fits the length, so it is planned: without programs for that plan it goes on at the least memory."""
    plain, planned, _ = with_code(TIGHT, time_limit_s=1.0, on_infeasible="warn", verify="off")
    program_of, refused = offloading.program_of, list[int]()

    def refusing(captured, *rest):
        if captured.made_from is not None:
            refused.append(1)
            raise SizesDifferError("A number is no expression of the sizes")
        return program_of(captured, *rest)

    train_alike(plain, planned, LONGEST)
    monkeypatch.setattr(offloading, "program_of", refusing)
    for _ in range(3):
        train_alike(plain, planned, LONGEST)
        assert is_from_other_sizes(planned.model)
    assert refused == [1]
    assert len(plans(planned.model)) == 1
