"""Random loops train as without a plan, within their budgets; `benchmarks/fuzz.py --loops` draws more of them."""

from __future__ import annotations

import pytest

from tests.fuzz_loops import compare_loop, draw_loop


# A graph that two backwards share, gradients by autograd.grad, and a graph that waits while another one is dropped.
@pytest.mark.parametrize("seed", [3, 4, 10])
def test_a_drawn_loop_is_exact_and_within_its_budget(seed):
    outcome = compare_loop(draw_loop(seed))
    assert not outcome.differences, outcome.recipe
    assert not outcome.is_over_budget, (outcome.peaks, outcome.budget_bytes, outcome.recipe)
    assert outcome.kinds
