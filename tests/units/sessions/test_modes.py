"""In which mode a step runs, and a captured graph, as tables: the first rule that applies decides."""

from __future__ import annotations

from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from hiremate_lightning.sessions.current_step import CurrentStep
from hiremate_lightning.sessions.eager_steps import EagerSteps
from hiremate_lightning.sessions.modes import Eager, GivenBack, GraphFacts, Mode, Offloaded, mode_of
from hiremate_lightning.signatures.eager_predictions import Prediction

PLAIN, OFFLOADED = False, True


class Predictions:
    """Predicts that a step fits in a mode, None for none, and knows which signatures are called like it."""

    def __init__(self, fits: bool | None, alike: list[object]) -> None:
        self._fits, self._alike = fits, alike

    def called_like(self, calls):
        return self._alike

    def with_margin(self, added_bytes):
        return added_bytes

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
    plan = SimpleNamespace(unplanned=SimpleNamespace(peak_bytes=10), solution=SimpleNamespace(is_plain=True))
    signature = SimpleNamespace(
        own_plan=plan,
        is_given_back=None,
        gains_nothing=lambda eager_bytes, free_bytes: is_gainless,
        saves_nothing=lambda eager_bytes, free_bytes: is_gainless,
    )
    steps = SimpleNamespace(
        _may_run_eager=True,
        _history=SimpleNamespace(planned=[], likely=lambda foreseen: signature if is_known else None),
        _predictions=Predictions(fits, [signature] if has_own_plan else []),
        _sizes_vary=False,
        _extra_ms=Counter(),
        _tell=lambda text: None,
        _room_bytes=lambda: 100,
        _is_worth_capturing=lambda calls, likely: is_worth_capturing,
        _offloading=SimpleNamespace(has_room=lambda size_bytes: has_room, files=SimpleNamespace(size_bytes=0)),
        _model=SimpleNamespace(memory=SimpleNamespace(device=torch.device("cpu"))),
    )
    steps._choose = partial(EagerSteps._choose, steps)
    begun = GivenBack(Prediction(PLAIN, 10, 10), signature, is_at_its_sizes=True) if is_begun else None
    step = CurrentStep(calls=["a call"], eager=begun)
    if is_begun:
        EagerSteps.called(steps, step, "another one")
    else:
        EagerSteps.step_begins(steps, step)
    return step.eager


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


@pytest.mark.parametrize(
    ("known", "mode"),
    [
        ({}, Mode.LEAST),
        ({"fits_by_others": True}, Mode.OTHER_SIZES),
        ({"fits_by_others": True, "has_plan": True}, Mode.PLANNED),
        ({"fits_by_others": True, "has_plan": True, "may_need_more": True}, Mode.LEAST),
    ],
)
def test_a_captured_graph_runs_in_the_first_open_mode(known, mode):
    facts = {"may_need_more": False, "has_plan": False, "fits_by_others": False, **known}
    may_need_more, has_plan, fits_by_others = facts.values()
    assert mode_of(GraphFacts(may_need_more, has_plan, lambda: fits_by_others)) is mode
