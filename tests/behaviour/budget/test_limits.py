"""What a step may take in each state of its gradients."""

from __future__ import annotations

import pytest

from hiremate_lightning.measuring.resident import Resident
from hiremate_lightning.signatures.limits import Limits

BEFORE = Resident(100, 0)  # no gradients yet
AFTER = Resident(140, 0, kept=frozenset({1, 2}))


@pytest.fixture
def limits() -> Limits:
    """Those of a step that was seen in both states."""
    return Limits(is_share=True).meeting(BEFORE, 180).meeting(AFTER, 200)


def test_the_budget_is_the_most_any_state_of_the_step_may_take(limits):
    """Of each state the latest one counts."""
    assert limits.meeting(BEFORE, 185).budget_bytes == 200
    assert limits.meeting(AFTER, 190).budget_bytes == 190


@pytest.mark.parametrize(("is_share", "budget_bytes"), [(True, 280), (False, 260)])
def test_a_share_counts_optimizer_state_that_is_new(is_share, budget_bytes):
    limits = Limits(is_share=is_share).meeting(BEFORE, 180).meeting(AFTER, 200)
    with_state = Resident(180, 0, kinds=(("parameters", 100), ("optimizer state", 80)))
    assert limits.meeting(with_state, 260).budget_bytes == budget_bytes
    assert limits.meeting(with_state, 260).meeting(with_state, 260).budget_bytes == budget_bytes


@pytest.mark.parametrize(("peak_bytes", "stays"), [(200, True), (201, False)])
def test_a_plan_stays_where_it_fits(limits, peak_bytes, stays):
    assert limits.stays(BEFORE, peak_bytes, is_least=False) is stays


@pytest.mark.parametrize(("peak_bytes", "have_risen"), [(185, True), (197, False), (205, False)])
def test_a_share_has_risen_where_the_plan_leaves_clear_room(peak_bytes, have_risen):
    limits = Limits(is_share=True).meeting(BEFORE, 180).with_plan(178).meeting(AFTER, 200)
    assert limits.have_risen(AFTER, peak_bytes) is have_risen


def test_nothing_has_risen_without_a_state_of_more(limits):
    """Nor where only an optimizer has made its state, nor is a number of bytes a share."""
    assert not limits.with_plan(200).meeting(BEFORE, 180).have_risen(BEFORE, 150)
    with_state = Resident(180, 0, kinds=(("parameters", 100), ("optimizer state", 80)))
    assert not limits.with_plan(200).meeting(with_state, 260).have_risen(with_state, 280)
    limits = Limits(is_share=False).meeting(BEFORE, 180).with_plan(150).meeting(AFTER, 220)
    assert not limits.have_risen(AFTER, 150)


LESS = Resident(120, 0, kept=AFTER.kept)


@pytest.mark.parametrize(
    ("least_of", "state", "peak_bytes", "is_least", "stays"),
    [
        (BEFORE, AFTER, 210, True, True),
        (BEFORE, AFTER, 211, True, False),
        (BEFORE, AFTER, 210, False, False),
        (BEFORE, Resident(120, 0), 230, True, True),
        (AFTER, LESS, 211, True, False),
    ],
    ids=["as much", "more in another state", "a plan that fitted", "nothing fits, more resident", "less resident"],
)
def test_a_larger_step_ends_the_least_memory_plan(limits, least_of, state, peak_bytes, is_least, stays):
    assert limits.with_least(least_of, 210).stays(state, peak_bytes, is_least=is_least) is stays
    assert not limits.with_least(AFTER, 210).without_least().stays(AFTER, 210, is_least=True), "the step has changed"


def test_a_step_of_one_state_has_its_own_budget_only():
    limits = Limits(is_share=True).meeting(BEFORE, 180)
    assert limits.budget_bytes == 180
    assert limits.stays(BEFORE, 180, is_least=False)
    assert not limits.stays(BEFORE, 181, is_least=False)
