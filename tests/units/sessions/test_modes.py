"""In which mode a step runs, as a table: the first rule that applies decides."""

from __future__ import annotations

from unittest.mock import create_autospec

import pytest

from hiremate_lightning.measuring.resident import Resident
from hiremate_lightning.planning.solvers.base import get_strategy
from hiremate_lightning.sessions.modes import Eager, GivenBack, ModeFacts, Offloaded, step_mode
from hiremate_lightning.sessions.offloading import Offloading
from hiremate_lightning.signatures.eager_predictions import EagerPredictions, Prediction, SavedTensors
from hiremate_lightning.signatures.limits import Limits
from hiremate_lightning.signatures.recorded_step import RecordedStep
from hiremate_lightning.signatures.step_signature import StepSignature
from tests.tiny import chain, plan_keeping

IN_MEMORY, OFFLOADED = SavedTensors
STEP = RecordedStep((), (), Resident(0, 0), get_strategy("portfolio"), Limits(is_share=False))


def facts(
    fits: SavedTensors | None = IN_MEMORY,
    gains_nothing: bool = False,
    has_own_plan: bool = False,
    is_begun: bool = False,
    is_worth_capturing: bool = False,
    has_room: bool = True,
) -> ModeFacts:
    """Return the facts of a step; `fits` is the fastest mode in which it fits without a plan, None for none."""
    plan = plan_keeping(*chain(3), ["a0", "a1", "a2"] if gains_nothing else [])
    signature = StepSignature((0,), step=STEP, plan=plan.with_measured(step_ms=1.0))
    predictions = create_autospec(EagerPredictions, instance=True)
    predictions.called_like.return_value = [signature] if has_own_plan else []
    predictions.with_margin.return_value = 0
    predictions.predict.return_value = None if fits is None else Prediction(fits, 10, 10)
    offloading = create_autospec(Offloading, instance=True)
    offloading.has_room.return_value = has_room
    return ModeFacts(
        calls=[],
        likely=signature,
        begun=GivenBack(Prediction(IN_MEMORY, 10, 10), signature, is_at_its_sizes=True) if is_begun else None,
        predictions=predictions,
        offloading=offloading,
        sizes_vary=False,
        room_bytes=lambda: 100,
        free_bytes=lambda: 100,
        is_worth_capturing=lambda: is_worth_capturing,
    )


@pytest.mark.parametrize(
    ("known", "mode"),
    [
        ({}, Eager),
        ({"fits": OFFLOADED}, Offloaded),
        ({"fits": None}, type(None)),  # it does not fit without a plan
        ({"fits": OFFLOADED, "is_worth_capturing": True}, type(None)),
        ({"fits": OFFLOADED, "has_room": False}, type(None)),
        ({"has_own_plan": True}, type(None)),
        ({"has_own_plan": True, "gains_nothing": True}, GivenBack),  # the plan gains nothing
        ({"has_own_plan": True, "gains_nothing": True, "is_begun": True}, GivenBack),
        ({"gains_nothing": True, "is_begun": True, "fits": None}, type(None)),  # a further call is another signature's
    ],
)
def test_a_step_runs_in_the_first_mode_open_to_it(known, mode, change_thresholds):
    change_thresholds(gives_back=True)
    assert type(step_mode(facts(**known))) is mode
