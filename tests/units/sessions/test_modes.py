"""In which mode a step runs, as a table: the first rule that applies decides."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hiremate_lightning.sessions.modes import Eager, GivenBack, Offloaded, StepFacts, step_mode
from hiremate_lightning.signatures.eager_predictions import Prediction, SavedTensors

IN_MEMORY, OFFLOADED = SavedTensors


def facts(
    fits: SavedTensors | None = IN_MEMORY,
    is_gainless: bool = False,
    has_own_plan: bool = False,
    is_begun: bool = False,
    is_worth_capturing: bool = False,
    has_room: bool = True,
) -> StepFacts:
    """Return the facts of a step; `fits` is the fastest mode in which it fits without a plan, None for none."""
    plan = SimpleNamespace(unplanned=SimpleNamespace(peak_bytes=10), solution=SimpleNamespace(keeps_all=True))
    signature = SimpleNamespace(
        own_plan=plan,
        is_given_back=None,
        gains_nothing=lambda eager_bytes, free_bytes: is_gainless,
        saves_nothing=lambda eager_bytes, free_bytes: is_gainless,
    )
    predictions = SimpleNamespace(
        called_like=lambda calls: [signature] if has_own_plan else [],
        with_margin=lambda added_bytes: added_bytes,
        predict=lambda calls, likely, room_bytes, saved: None if fits is None else Prediction(fits, 10, 10),
    )
    return StepFacts(
        calls=["a call"],
        likely=signature,
        begun=GivenBack(Prediction(IN_MEMORY, 10, 10), signature, is_at_its_sizes=True) if is_begun else None,
        predictions=predictions,
        offloading=SimpleNamespace(has_room=lambda size_bytes: has_room),
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
        ({"has_own_plan": True, "is_gainless": True}, GivenBack),  # the plan gains nothing
        ({"has_own_plan": True, "is_gainless": True, "is_begun": True}, GivenBack),
        ({"is_gainless": True, "is_begun": True, "fits": None}, type(None)),  # a further call is another signature's
    ],
)
def test_a_step_runs_in_the_first_mode_that_is_open_to_it(known, mode):
    assert type(step_mode(facts(**known))) is mode
