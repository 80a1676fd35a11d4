"""Code for all sizes takes seconds to make: steps of new sizes offload values until it has become worth that."""

from __future__ import annotations

from hiremate_lightning.testing import OFFLOADED, is_from_other_sizes, step_under_way
from tests.behaviour.sizes.test_made_code import FIRST, LONG, NEW, SHORT, train_alike, trainings


def test_steps_of_new_sizes_offload_first_and_run_by_plans_later(change_thresholds):
    plain, planned, _ = trainings()
    ways = []
    for length in [FIRST, FIRST, SHORT, LONG, *NEW]:
        if length == NEW[1]:
            change_thresholds(worth_made_code=0.0)
        train_alike(plain, planned, length)
        ways.append(step_under_way(planned.model).modes)
    assert ways[3:5] == [(OFFLOADED,)] * 2
    assert OFFLOADED not in {way for step in ways[5:] for way in step}
    assert is_from_other_sizes(planned.model)
