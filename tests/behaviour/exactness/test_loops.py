"""Training scripts end with the same weights, bit for bit, whether or not one line plans their model."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from tests.loops import Outcome, Script, assert_same, assert_within_budget, run

BEFORE, AFTER = (("no", 3), ("bf16", 1)), (("bf16", 3), ("no", 1))  # precision and steps that gather gradients
SCRIPTS = [
    *(Script("plain", *how, "before") for how in (*BEFORE, AFTER[0])),  # nothing is prepared there
    *(Script(framework, *how, "before") for framework in ("fabric", "accelerate") for how in BEFORE),
    *(Script(framework, *how, "after") for framework in ("fabric", "accelerate") for how in AFTER),
]
ON_GPU = [pytest.param(replace(s, device="cuda"), marks=pytest.mark.gpu) for s in SCRIPTS if s.accumulate > 1]


@cache
def without_a_plan(script: Script) -> Outcome:
    return run(script)


@pytest.mark.parametrize("script", [*SCRIPTS, *ON_GPU], ids=str)
def test_a_script_with_a_plan_ends_with_the_same_weights(script: Script) -> None:
    expected = without_a_plan(replace(script, place=None))

    found = run(script)

    assert_same(found, expected)
    assert_within_budget(found.plan)
