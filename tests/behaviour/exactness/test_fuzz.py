"""Random small networks and loops train under random budgets as without: every number bit for bit, never over budget.

`benchmarks/fuzz.py` draws as many as are asked for; here are a few, and each operation once by itself.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz_loops import compare_loop, draw_loop
from tests.fuzz_models import MiscompiledError, Outcome, Recipe, RejectedError, compare, draw
from tests.fuzz_operations import OPERATIONS

# What breaks the graph. A value that several graphs read gets its gradient added up graph by graph, in another order.
BREAKS = ("branch on data", "code between graphs", "recurrent", "batch norm")
WHOLE = sorted(set(OPERATIONS).difference(BREAKS))

# Dynamo makes an instance of each torch.autograd.Function that it traces, which torch itself warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def check(outcome: Outcome) -> None:
    """Fail where a planned training is not the plain one, or took more than its budget."""
    assert not outcome.is_wrong, f"{outcome.recipe}: {', '.join(outcome.differences[:5])}, {outcome.deviation:.0e}"
    assert not outcome.is_over_budget, f"{outcome.recipe}: {outcome.excess_bytes:,} bytes over the budget"


@pytest.fixture(autouse=True)
def _quiet():
    """Don't let Dynamo say where it breaks graphs: some of these networks are made to break them."""
    torch._logging.set_logs(dynamo=40)
    yield
    torch._logging.set_logs()


# To shrink takes minutes: add Phase.shrink by hand for a failure.
@settings(
    max_examples=15,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(st.data())
def test_drawn_networks_train_as_eager_and_within_the_budget(data):
    recipe = draw(lambda values: data.draw(st.sampled_from(list(values))), longest=7, names=WHOLE)
    try:
        check(compare(recipe))
    except (RejectedError, MiscompiledError):
        return


def test_tracing_graphs_that_come_again_is_within_the_budget():
    """States of the random generator, 5 KB each, while a graph is traced anew in each step of 77 KB."""
    between = [("code between graphs", *places) for places in ((1, 1, 6), (1, 2, 4), (7, 3, 3))]
    first, *others = between
    operations = (first, ("copy", 6, 3, 7), ("embedding", 3, 3, 2), ("softmax", 3, 1, 7))
    ends = (("gated activation", 5, 4, 0), *others, ("attention of the library", 0, 5, 3))
    recipe = Recipe((*operations, *ends), structure="several", share=2, optimizer=1, seed=598, accumulates=True)
    outcome = compare(recipe)
    assert not outcome.is_wrong
    assert not outcome.is_over_budget, outcome.peaks


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_each_operation_trains_as_eager_and_within_the_budget(name):
    setting = random.Random(name).randrange(8)
    recipe = Recipe((("linear", 0, 1, 0), (name, 0, 1, setting), ("activation", 0, 0, 0)), rows=2, share=4)
    outcome = compare(recipe)
    check(outcome)
    assert outcome.plan is not None


def test_a_wrong_number_is_found():
    """What these tests would say if a planned step differed in one bit from the same graph without recomputation."""
    bits = itertools.count(1)  # other ones without recomputation

    def tamper(record):
        name = next(n for n in record.values if n.startswith("gradient of first.weight"))
        record.values[name].view(torch.int32).view(-1)[0] ^= next(bits)

    outcome = compare(Recipe((("linear", 0, 0, 0),)), tamper=tamper)
    assert len(outcome.differences) == 1
    assert outcome.is_wrong


def test_what_plain_training_refuses_is_rejected():
    recipe = Recipe((("activation", 0, 0, 4), ("scale in place", 0, 0, 0)))
    with pytest.raises(RejectedError, match="inplace operation"):
        compare(recipe)


# A graph that two backwards share, gradients by autograd.grad, and a graph that waits while another one is dropped.
@pytest.mark.parametrize("seed", [3, 4, 10])
def test_a_drawn_loop_is_exact_and_within_its_budget(seed):
    outcome = compare_loop(draw_loop(seed))
    assert not outcome.differences, outcome.recipe
    assert not outcome.is_over_budget, (outcome.peaks, outcome.budget_bytes, outcome.recipe)
    assert outcome.kinds
