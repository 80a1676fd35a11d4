"""Which way a step runs, as tables: the first rule that has a way decides."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hiremate_lightning.sessions.current_step import CurrentStep
from hiremate_lightning.sessions.unplanned import StepChoices
from hiremate_lightning.sessions.ways import BY_GRAPHS, Eager, Offloaded, Way, WayChoices, choose_way
from hiremate_lightning.signatures.plain_steps import Prediction
from hiremate_lightning.signatures.releasing import PlainTrial
from hiremate_lightning.signatures.step_signature import StepSignature

RULES = ("given_back", "own_plan", "without_plan", "plan_of_other_sizes", "least_memory")
SIGNATURE = StepSignature((0,))
PLAIN, OFFLOADED = False, True


@pytest.mark.parametrize("first", range(len(RULES)))
def test_the_first_rule_that_has_a_way_decides(first):
    asked = []

    def rule(number: int):
        return lambda: (asked.append(number), None if number < first else ways[number])[1]

    ways = [Way() for _ in RULES]
    choices = WayChoices()
    for number, name in enumerate(RULES):
        setattr(choices, name, rule(number))
    assert choose_way(choices) is ways[first]
    assert asked == list(range(first + 1)), "what comes after it costs nothing"


def test_where_no_rule_has_a_way_graphs_choose():
    assert choose_way(WayChoices()) is BY_GRAPHS


def without_plan(way: bool | None, gainless: StepSignature | None = None) -> Eager | None:
    if way is None:
        return None
    prediction = Prediction(way, 10, 10)
    return Offloaded(prediction, SIGNATURE, room=None) if way is OFFLOADED else Eager(prediction, SIGNATURE, gainless)


def choose(
    way: bool | None = PLAIN,
    gainless: StepSignature | None = None,
    runs_plain: bool = True,
    has_own_plan: bool = False,
    is_begun: bool = False,
) -> Way:
    """Choose the way of a step of which so much is known; `way` is the fastest one that fits without a plan."""
    steps = SimpleNamespace(
        without_plan=lambda step, begun: without_plan(way),
        has_own_plan=lambda step: has_own_plan,
        given_back=lambda step, signature: without_plan(way, signature),
    )
    SIGNATURE.trial, SIGNATURE.plan = PlainTrial(is_released=runs_plain), SimpleNamespace(saves_nothing=False)
    begun = without_plan(PLAIN, gainless) if is_begun else None
    return choose_way(StepChoices(steps, CurrentStep(), gainless, begun))


@pytest.mark.parametrize(
    ("known", "chosen"),
    [
        ({}, Eager),
        ({"way": OFFLOADED}, Offloaded),
        ({"way": None}, type(BY_GRAPHS)),  # it does not fit without a plan, or nothing has one yet
        ({"has_own_plan": True}, type(BY_GRAPHS)),
        ({"has_own_plan": True, "gainless": SIGNATURE}, Eager),  # the plan gains nothing
        ({"has_own_plan": True, "gainless": SIGNATURE, "runs_plain": False}, type(BY_GRAPHS)),  # it is timed in turns
        ({"has_own_plan": True, "gainless": SIGNATURE, "is_begun": True, "runs_plain": False}, Eager),
        (
            {"gainless": SIGNATURE, "is_begun": True, "way": None},
            type(BY_GRAPHS),
        ),  # a further call is another signature's
    ],
)
def test_a_step_runs_by_the_first_way_that_is_open_to_it(known, chosen):
    assert type(choose(**known)) is chosen


def test_a_step_that_is_given_back_names_its_signature():
    way = choose(gainless=SIGNATURE, has_own_plan=True)
    assert isinstance(way, Eager)
    assert way.gainless is SIGNATURE
