"""In which mode a step runs, as a table: the first rule that applies decides."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hiremate_lightning.sessions.current_step import CurrentStep
from hiremate_lightning.sessions.eager_steps import EagerSteps
from hiremate_lightning.sessions.modes import Eager, GivenBack, Offloaded
from hiremate_lightning.signatures.eager_predictions import Prediction
from hiremate_lightning.signatures.eager_trial import EagerTrial
from hiremate_lightning.signatures.step_signature import StepSignature

SIGNATURE = StepSignature((0,))
PLAIN, OFFLOADED = False, True


def without_plan(fits: bool | None) -> Eager | None:
    if fits is None:
        return None
    prediction = Prediction(fits, 10, 10)
    return Offloaded(prediction, SIGNATURE, offloading=None) if fits is OFFLOADED else Eager(prediction, SIGNATURE)


def given_back(fits: bool | None) -> GivenBack | None:
    return None if fits is None else GivenBack(Prediction(fits, 10, 10), SIGNATURE, is_at_its_sizes=True)


def choose(
    fits: bool | None = PLAIN,
    gainless: StepSignature | None = None,
    runs_eager: bool = True,
    has_own_plan: bool = False,
    is_begun: bool = False,
) -> Eager | None:
    """Choose the mode of a step of which so much is known; `fits` is the fastest one that fits without a plan."""
    steps = SimpleNamespace(
        _without_plan=lambda step, begun: without_plan(fits),
        _has_own_plan=lambda step: has_own_plan,
        _given_back=lambda step, signature: given_back(fits),
    )
    SIGNATURE.trial, SIGNATURE.plan = EagerTrial(is_given_back=runs_eager), SimpleNamespace(saves_nothing=False)
    begun = given_back(PLAIN) if is_begun else None
    return EagerSteps._mode(steps, CurrentStep(), gainless, begun)


@pytest.mark.parametrize(
    ("known", "mode"),
    [
        ({}, Eager),
        ({"fits": OFFLOADED}, Offloaded),
        ({"fits": None}, type(None)),  # it does not fit without a plan, or nothing has one yet
        ({"has_own_plan": True}, type(None)),
        ({"has_own_plan": True, "gainless": SIGNATURE}, GivenBack),  # the plan gains nothing
        ({"has_own_plan": True, "gainless": SIGNATURE, "runs_eager": False}, type(None)),  # it is timed in turns
        ({"has_own_plan": True, "gainless": SIGNATURE, "is_begun": True, "runs_eager": False}, GivenBack),
        ({"gainless": SIGNATURE, "is_begun": True, "fits": None}, type(None)),  # a further call is another signature's
    ],
)
def test_a_step_runs_in_the_first_mode_that_is_open_to_it(known, mode):
    assert type(choose(**known)) is mode
