"""Step signatures: which one is foreseen."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hiremate_lightning import hiremate
from hiremate_lightning.signatures.history import CERTAIN, SEEN, History, Order, place_in
from tests.exact import quiet

CRITIC, GENERATOR = (0,), (1, 2)
PLAN = object()  # whatever it says
STEP = SimpleNamespace(waits=False)


def run(history, graphs):
    history.ended(history.get_or_make(graphs), (0, 0), is_by_plans=False, fits_nothing=False)


def plan(history, graphs):
    history.record(history.get_or_make(graphs), STEP)
    history.install(history.get_or_make(graphs), PLAN, {})


def likely(history):
    return history.likely(history.foresee((0, 0))).graphs


def all_likely(history):
    return {signature.graphs for signature in history.all_likely(history.foresee((0, 0)))}


def alternating():
    """Two signatures that have come in turns; each was planned when the next step began."""
    history = History()
    run(history, CRITIC)
    plan(history, CRITIC)
    run(history, GENERATOR)
    plan(history, GENERATOR)
    run(history, CRITIC)
    return history


def test_signatures_in_turns_are_foreseen_once_both_are_planned():
    """Replanning as a step begins keeps their order."""
    history = alternating()
    assert likely(history) == GENERATOR
    run(history, GENERATOR)
    assert likely(history) == CRITIC
    plan(history, CRITIC)
    run(history, CRITIC)
    assert likely(history) == GENERATOR


def test_only_the_latest_unrecorded_signatures_are_kept():
    """New sizes come without end in a long run."""
    history = alternating()
    for number in range(3, SEEN + 10):
        run(history, (number,))
    assert len(list(history)) == SEEN + 2
    assert [signature.graphs for signature in history.planned] == [CRITIC, GENERATOR]
    assert history.get_or_make((SEEN + 9,)).past.count == 1
    assert history.get_or_make((3,)).past.count == 0


def test_a_dropped_signature_has_no_plan_and_keeps_its_counts():
    history = alternating()
    history.drop(history.get_or_make(CRITIC))
    assert [signature.graphs for signature in history.planned] == [GENERATOR]
    assert history.latest is None
    assert history.get_or_make(CRITIC).past.count == 2


def test_a_cycle_of_signatures_is_foreseen_after_two_rounds():
    order, cycle = Order(), [CRITIC] * 5 + [GENERATOR]
    for signature in [*cycle, *cycle]:
        order.note(signature, 100)
    for signature in [*cycle, *cycle]:
        assert next(order.foresee(100)) == signature
        order.note(signature, 100)


def test_a_signature_is_foreseen_by_the_size_of_its_step():
    order = Order()
    for signature, size_bytes in [(CRITIC, 100)] * 7 + [(GENERATOR, 60)]:
        order.note(signature, size_bytes)
    assert next(order.foresee(60)) == GENERATOR
    assert next(order.foresee(100)) == CRITIC
    assert next(order.foresee(80), None) is None


def test_an_order_is_certain_after_many_foreseen_steps():
    order = Order()
    for _ in range(CERTAIN + 1):
        assert not order.is_certain
        order.note(CRITIC, 100)
    assert order.is_certain
    order.note(GENERATOR, 100)
    assert not order.is_certain


def test_a_certain_order_tells_confused_signatures_apart():
    history, longer = alternating(), (*GENERATOR, 3)
    run(history, GENERATOR)
    run(history, longer)
    plan(history, longer)
    history.confuse(history.get_or_make(GENERATOR))
    run(history, GENERATOR)
    assert all_likely(history) == {GENERATOR, longer}
    for index in range(2 * CERTAIN):
        run(history, GENERATOR if index % 2 else longer)
    assert all_likely(history) == {longer}


def test_a_signature_planned_later_joins_those_it_begins_like():
    history, longer, shorter = alternating(), (*GENERATOR, 3), GENERATOR[:1]
    history.confuse(history.get_or_make(GENERATOR))
    for graphs in (longer, shorter):
        run(history, graphs)
        plan(history, graphs)
    taken = [history.taken_for(history.get_or_make(graphs)) for graphs in (shorter, CRITIC)]
    assert [{one.graphs for one in ones} for ones in taken] == [{GENERATOR, longer, shorter}, {CRITIC}]


@pytest.mark.parametrize(
    ("ran", "place"), [((1,), 0), ((2,), 1), ((1, 3), 3), ((2, 2), 2), ((1, 3, 2), None), ((4,), None), ((), -1)]
)
def test_a_step_that_leaves_out_graphs_keeps_its_place(ran, place):
    history = History()
    signature = history.get_or_make((1, 2, 2, 3))
    history.record(signature, STEP)
    assert place_in(signature, ran) == place


def train_in_turns(model, optimizers, index):
    """Train a critic and a generator once each."""
    torch.manual_seed(index)
    noise = torch.randn(256, 16)
    with torch.no_grad():
        fake = model["g"](noise)
    optimizers[0].zero_grad()
    model["c"](fake).mean().backward()
    optimizers[0].step()
    optimizers[1].zero_grad()
    model["c"](model["g"](noise)).mean().backward()
    optimizers[1].step()


def test_two_networks_in_turns_are_not_planned_anew_each_step(caplog):
    """The gradients of one exist while the other trains, so that what exists before a step alternates."""
    generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64))
    critic = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    model = hiremate(nn.ModuleDict({"g": generator, "c": critic}), "70%", verbose=False, on_infeasible="warn")
    optimizers = [torch.optim.Adam(part.parameters()) for part in (critic, generator)]
    caplog.set_level(logging.INFO, "hiremate_lightning")
    with quiet():
        for index in range(7):
            if index == 4:
                caplog.clear()
            train_in_turns(model, optimizers, index)
    assert "planned anew" not in caplog.text
