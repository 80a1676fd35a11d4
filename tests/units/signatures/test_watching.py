"""Which steps are watched: one fixed schedule decides, and looks become ever rarer."""

from __future__ import annotations

import random
from itertools import cycle, islice
from types import SimpleNamespace

import pytest

from hiremate_lightning.planning.headroom import GUARD_BYTES
from hiremate_lightning.signatures.history import History, Order
from hiremate_lightning.signatures.step_signature import Reason, StepSignature
from hiremate_lightning.signatures.watching import (
    IN_A_ROW,
    TO_PLAN,
    Look,
    LookSchedule,
    Shown,
    WatchFacts,
    WatchPolicy,
)

SIGNATURE, OTHER, SIZE = (0,), (1,), 100


def planned(
    signature: StepSignature | None,
    has_peak: bool = True,
    has_time: bool = True,
    may_grow: bool = False,
    has_grown: bool | None = None,
    is_higher: bool = False,
) -> StepSignature | None:
    """Give a signature a measured plan, and uncaptured code that may grow."""
    if signature is not None:
        peak_bytes, step_ms = 0 if has_peak else None, 1.0 if has_time else None
        measured = SimpleNamespace(peak_bytes=peak_bytes, step_ms=step_ms, predicted_bytes=0)
        signature.plan = SimpleNamespace(measured=measured, budget_bytes=0, planned_peak_bytes=int(is_higher))
        signature.step = SimpleNamespace(outside_bytes=2 * GUARD_BYTES * may_grow)
        signature.watched.has_grown = signature.watched.has_grown if has_grown is None else has_grown
    return signature


class Training:
    """Steps of signatures in some order, each watched where the policy says so."""

    def __init__(self, sees_frees: bool = True, may_grow: bool = True) -> None:
        self.policy = WatchPolicy()
        self.history, self.order = History(), Order()
        self.planned: dict[tuple[int, ...], tuple[bool, bool]] = {}  # whether the peak was measured, and the time
        self.peaks = 0  # that were seen
        self._sees_frees, self._may_grow = sees_frees, may_grow
        self._was_measured = False

    def step(self, signature: tuple[int, ...], size_bytes: int = SIZE) -> Look:
        foreseen = [*self.order.foresee(size_bytes)]
        likely = next((k for k in foreseen if k in self.planned), next(reversed(self.planned), None))
        look = self._begin(likely, size_bytes, next(iter(foreseen), None))
        self.policy.step_ended(look, self.history.get_or_make(signature), self._learn(signature, look))
        self.order.note(signature, size_bytes)
        return look

    def steps(self, *signatures: tuple[int, ...]) -> list[int]:
        """Run steps; return at which of them, from 1, memory was measured."""
        watched = [self.step(signature) for signature in signatures]
        return [index for index, watch in enumerate(watched, start=1) if watch.is_measured]

    def _begin(self, signature: tuple[int, ...] | None, size_bytes: int, foreseen: tuple[int, ...] | None) -> Look:
        has_peak, has_time = self.planned.get(signature, (False, False))
        likely, first = (graphs and self.history.get_or_make(graphs) for graphs in (signature, foreseen))
        likely = planned(likely, has_peak, has_time, self._may_grow)
        return self.policy.choose_look(WatchFacts(likely, first, size_bytes))

    def _learn(self, signature: tuple[int, ...], look: Look) -> Shown:
        sees_frees = self._sees_frees or self._was_measured
        self._was_measured = look.is_measured
        has_peak, has_time = self.planned.get(signature, (False, False))
        if not look.is_measured:
            if signature not in self.planned:
                self.policy.missed(self.history.get_or_make(signature))
            elif look.is_timed and has_peak:
                self.planned[signature] = True, True
            return Shown.NOTHING
        if signature not in self.planned:
            self.planned[signature] = False, False
            self.policy.found(self.history.get_or_make(signature))
            self.policy.planned(self.history.get_or_make(signature))
            return Shown.NOTHING
        if not sees_frees:
            return Shown.NO_FREES
        self.planned[signature] = True, has_time
        self.peaks += 1
        return Shown.PEAK


@pytest.mark.parametrize(
    ("known", "foreseen", "size_bytes", "reason"),
    [
        (None, None, SIZE, Reason.PLAN),  # nothing has a plan
        ({}, SIGNATURE, 2 * SIZE, Reason.PLAN),  # larger than any step before
        ({}, OTHER, SIZE, Reason.PLAN),  # missed before
        ({"has_peak": False, "has_time": False}, SIGNATURE, SIZE, Reason.PEAK),
        ({"has_time": False}, SIGNATURE, SIZE, Reason.TIME),
        ({}, SIGNATURE, SIZE, None),
        ({"has_grown": True}, SIGNATURE, SIZE, Reason.GROWN),
        ({"may_grow": True}, SIGNATURE, SIZE, Reason.AGAIN),
    ],
)
def test_each_step_has_its_reason_to_be_watched(known, foreseen, size_bytes, reason):
    policy, history = WatchPolicy(), History()
    signature = history.get_or_make(SIGNATURE)
    for _ in range(8):
        look = policy.choose_look(WatchFacts(planned(signature), signature, SIZE))
        policy.step_ended(look, signature)
    policy.missed(history.get_or_make(OTHER))
    likely = None if known is None else planned(signature, **known)
    step = WatchFacts(likely, foreseen and history.get_or_make(foreseen), size_bytes)
    is_timed = reason is Reason.TIME
    is_measured = reason is not None and not is_timed
    assert policy.choose_look(step) == Look(reason, is_measured, is_timed)


def test_a_schedule_has_looks_at_once_and_then_at_doubled_steps():
    schedule, looks, found = LookSchedule(at_once=2, first=8), 0, []
    for steps in range(100):
        if schedule.is_due(looks, steps):
            looks += 1
            found.append(steps)
    assert found == [0, 1, 8, 16, 32, 64]


def test_a_steady_signature_is_settled_in_three_steps():
    training = Training()
    looks = [training.step(SIGNATURE) for _ in range(5)]
    assert [look.is_measured for look in looks] == [True, True, False, False, False]
    assert [look.is_timed for look in looks] == [False, False, True, False, False]


@pytest.mark.parametrize("seed", range(12))
def test_looks_become_rare_whatever_signatures_come(seed):
    rng = random.Random(seed)
    signatures = [(number,) for number in range(rng.randrange(1, 7))]
    order = [rng.choice(signatures) for _ in range(rng.randrange(1, 12))]
    kinds_by_chance = seed % 3 == 0
    training = Training(sees_frees=rng.random() < 0.5)
    measured = training.steps(
        *(rng.choice(signatures) if kinds_by_chance else signature for signature in islice(cycle(order), 3000))
    )
    seen = set(signatures if kinds_by_chance else order)
    assert training.planned.keys() == seen
    if not kinds_by_chance:
        assert all(has_peak and has_time for has_peak, has_time in training.planned.values())
    assert len([step for step in measured if step > 2000]) <= IN_A_ROW * 2 * len(seen)


def test_a_cycle_of_adversarial_training_is_planned():
    training = Training()
    measured = training.steps(*islice(cycle([SIGNATURE] * 5 + [OTHER]), 60))
    assert training.planned == {SIGNATURE: (True, True), OTHER: (True, True)}
    assert len(measured) <= 20


def test_sizes_that_grow_for_ever_are_not_measured_for_ever():
    training = Training()
    watched = [training.step((size_bytes,), size_bytes) for size_bytes in range(1, 1500)]
    assert sum(look.is_measured for look in watched) <= 2 * (TO_PLAN.at_once + 5)


def test_a_signature_is_measured_twice_to_see_what_it_frees():
    """After 8 steps, 16 and 32; the first of two in a row does not see what the step before allocated."""
    training = Training(sees_frees=False)
    assert training.steps(*[SIGNATURE] * 60) == [1, 2, 9, 10, 17, 18, 33, 34]
    assert training.planned[SIGNATURE] == (True, True)


def test_other_signatures_are_measured_until_a_step_is_seen():
    """What a step frees is what the step before has left, of whatever signature that is."""
    training = Training(sees_frees=False, may_grow=False)
    training.steps(*[SIGNATURE, OTHER] * 10)
    training.history.get_or_make(OTHER).watched.has_grown = True
    peaks = training.peaks
    assert training.steps(SIGNATURE, OTHER, SIGNATURE, OTHER, SIGNATURE, OTHER) == [2, 3, 4]
    assert training.peaks > peaks
    assert not training.history.get_or_make(OTHER).watched.has_grown


def test_looks_that_see_no_frees_end():
    training = Training(sees_frees=False, may_grow=False)
    training.steps(*[SIGNATURE] * 4, *[OTHER] * 4)
    training.history.get_or_make(OTHER).watched.has_grown = True
    training.steps(OTHER)
    assert len(training.steps(*[SIGNATURE] * 40)) <= IN_A_ROW


def test_growth_that_comes_again_is_measured_ever_more_rarely():
    training, measured = Training(may_grow=False), 0
    for index in range(2000):
        training.history.get_or_make(SIGNATURE).watched.has_grown = index > 3
        measured += training.step(SIGNATURE).is_measured
    assert 12 <= measured <= 20


def test_what_failed_is_not_counted():
    policy = WatchPolicy()
    policy.choose_look(WatchFacts(None, None, SIZE))  # and does not end
    assert policy.choose_look(WatchFacts(None, None, SIZE)).is_measured


def test_a_state_of_a_higher_peak_is_measured_at_its_third_step():
    policy, signature = WatchPolicy(), History().get_or_make(SIGNATURE)
    look = policy.choose_look(WatchFacts(planned(signature, has_peak=False), signature, SIZE))
    policy.step_ended(look, signature, Shown.PEAK)
    found = []
    for _ in range(3):
        look = policy.choose_look(WatchFacts(planned(signature, is_higher=True), signature, SIZE))
        found.append((look.is_measured, look.is_timed))
        policy.step_ended(look, signature)
    assert found == [(False, False), (False, False), (True, False)]
