"""In which mode a step runs, as a table: the first rule that applies decides."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

from hiremate_lightning.sessions.current_step import CurrentStep
from hiremate_lightning.sessions.eager_steps import EagerSteps
from hiremate_lightning.sessions.modes import Eager, GivenBack, Offloaded
from hiremate_lightning.signatures.eager_predictions import Prediction
from hiremate_lightning.signatures.step_signature import StepSignature

SIGNATURE = StepSignature((0,))
PLAIN, OFFLOADED = False, True


class Predictions:
    """Predicts that a step fits in a way, None for none, and knows which signatures are called like it."""

    def __init__(self, fits: bool | None, alike: list[StepSignature]) -> None:
        self._fits, self._alike = fits, alike

    def called_like(self, calls):
        return self._alike

    def predict(self, calls, likely, room_bytes, saves_memory):
        return None if self._fits is None else Prediction(self._fits, 10, 10)


def choose(
    fits: bool | None = PLAIN,
    is_gainless: bool = False,
    has_own_plan: bool = False,
    is_begun: bool = False,
    is_known: bool = True,
    is_worth_capturing: bool = False,
    has_room: bool = True,
) -> Eager | None:
    """Choose the mode of a step of which so much is known; `fits` is the fastest one that fits without a plan."""
    files = SimpleNamespace(forget=lambda: None)
    steps = SimpleNamespace(
        _predictions=Predictions(fits, [SIGNATURE] if has_own_plan else []),
        _sizes_vary=False,
        _room_bytes=lambda: 100,
        _is_to_be_captured=lambda step, likely: is_worth_capturing,
        _offloading=SimpleNamespace(has_room=lambda size_bytes: has_room, files=files),
    )
    steps._given_back = partial(EagerSteps._given_back, steps)
    SIGNATURE.plan = SimpleNamespace(saves_nothing=False, unplanned=SimpleNamespace(peak_bytes=10))
    begun = GivenBack(Prediction(PLAIN, 10, 10), SIGNATURE, is_at_its_sizes=True) if is_begun else None
    gainless = SIGNATURE if is_gainless else None
    return EagerSteps._mode(steps, CurrentStep(), SIGNATURE if is_known else None, gainless, begun)


@pytest.mark.parametrize(
    ("known", "mode"),
    [
        ({}, Eager),
        ({"fits": OFFLOADED}, Offloaded),
        ({"is_known": False}, type(None)),  # nothing has a plan yet
        ({"fits": None}, type(None)),  # it does not fit without a plan
        ({"fits": OFFLOADED, "is_worth_capturing": True}, type(None)),
        ({"fits": OFFLOADED, "has_room": False}, type(None)),
        ({"has_own_plan": True}, type(None)),
        ({"has_own_plan": True, "is_gainless": True}, GivenBack),  # the plan gains nothing
        ({"has_own_plan": True, "is_gainless": True, "is_begun": True}, GivenBack),
        ({"is_gainless": True, "is_begun": True, "fits": None}, type(None)),  # a further call is another signature's
    ],
)
def test_a_step_runs_in_the_first_mode_that_is_open_to_it(known, mode):
    assert type(choose(**known)) is mode
