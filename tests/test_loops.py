"""Training scripts end with the same weights, bit for bit, whether or not one line plans their model."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from .loops import Outcome, Script, assert_same, assert_within_budget, run

SCRIPTS = [
    Script(framework, precision, accumulate, place)
    for framework, precision, accumulate, place in product(
        ("plain", "fabric", "accelerate"), ("no", "bf16"), (1, 3), ("before", "after")
    )
    if (framework, place) != ("plain", "after")  # nothing is prepared there
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
