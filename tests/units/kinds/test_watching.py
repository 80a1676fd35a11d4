"""Which steps are watched: one policy decides, and all that it decides takes 1 % of the time."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import cycle, islice, pairwise

import pytest

from hiremate_lightning.kinds.history import History, Order
from hiremate_lightning.kinds.step_kind import PlanState, Reason
from hiremate_lightning.kinds.watching import (
    FREE_TO_PLAN,
    MEASURED,
    SHARE,
    STEPS,
    Expected,
    Saw,
    Watch,
    WatchPolicy,
)

KIND, OTHER, SIZE = (0,), (1,), 100


class Clock:
    """Tells the seconds that a test has let pass."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Training:
    """Steps of kinds in some order, each watched where the policy says so; a watched one takes some more seconds."""

    def __init__(
        self, extra_s: float = 4.0, sees_frees: bool = True, may_grow: bool = True, glance_s: float | None = None
    ) -> None:
        self.clock = Clock()
        self.policy = WatchPolicy(self.clock)
        self.history, self.order = History(), Order()
        self.planned: dict[tuple[int, ...], tuple[bool, bool]] = {}  # whether the peak was measured, and the time
        self.seconds: list[tuple[float, float]] = []  # of each step, and those of watching it
        self.measured = 0
        self._sees_frees, self._may_grow = sees_frees, may_grow
        glance_s = extra_s if glance_s is None else glance_s
        self._extra_s = dict.fromkeys(Watch, extra_s) | {Watch.NOTHING: 0.0, Watch.GLANCE: glance_s}
        self._was_measured = False

    def step(self, kind: tuple[int, ...], size_bytes: int = SIZE) -> Watch:
        self.policy.account_for_last_step()
        foreseen = [*self.order.foresee(size_bytes)]
        likely = next((k for k in foreseen if k in self.planned), next(reversed(self.planned), None))
        expected = self._expect(likely, size_bytes, next(iter(foreseen), None))
        after = None if likely is None else self.order.follower(likely)
        following = self._expect(after, 0, after) if after in self.planned else None
        look = self.policy.step_begins(replace(expected, following=following))
        watch = look.watch
        extra_s = self._extra_s[watch]
        self.clock.now_s += 1.0 + extra_s
        self.seconds.append((1.0, extra_s))
        self.policy.step_ended(look, self.history[kind], self._learn(kind, watch))
        self.order.note(kind, size_bytes)
        return watch

    def _expect(self, kind: tuple[int, ...] | None, size_bytes: int, foreseen: tuple[int, ...] | None) -> Expected:
        has_peak, has_time = self.planned.get(kind, (False, False))
        status = PlanState.PLANNED if not has_peak else PlanState.TIMED if has_time else PlanState.MEASURED
        seen = (graphs and self.history[graphs] for graphs in (kind, foreseen))
        return Expected(*seen, size_bytes, status, may_grow=self._may_grow)

    def _learn(self, kind: tuple[int, ...], watch: Watch) -> Saw:
        sees_frees = self._sees_frees or self._was_measured
        self._was_measured = watch in MEASURED
        has_peak, has_time = self.planned.get(kind, (False, False))
        if watch not in MEASURED:
            if kind not in self.planned:
                self.policy.missed(self.history[kind])
            elif watch is Watch.TIME and has_peak:
                self.planned[kind] = True, True
            return Saw.NOTHING
        self.measured += 1
        if kind not in self.planned:
            self.planned[kind] = False, False
            self.policy.found(self.history[kind])
            self.policy.planned(self.history[kind])
            return Saw.NOTHING
        if not sees_frees:
            return Saw.NO_FREES
        self.planned[kind] = True, has_time
        return Saw.PEAK


def worst_share(seconds: list[tuple[float, float]]) -> float:
    """Return the largest share of the time of any 500 steps that was taken by watching them."""
    windows = (seconds[start : start + STEPS] for start in range(0, len(seconds) - STEPS + 1, 10))
    return max(sum(extra for _, extra in window) / sum(map(sum, window)) for window in windows)


def among(history: History, expected: Expected) -> Expected:
    """Return what is expected of a step with the kinds of a history, in place of their graphs."""
    kind, foreseen = (graphs and history[graphs] for graphs in (expected.kind, expected.foreseen))
    return replace(expected, kind=kind, foreseen=foreseen)


@pytest.mark.parametrize(
    ("expected", "reason"),
    [
        (Expected(None, None, SIZE), Reason.PLAN),  # nothing has a plan
        (Expected(KIND, KIND, 2 * SIZE), Reason.PLAN),  # larger than any step before
        (Expected(KIND, OTHER, SIZE, status=PlanState.TIMED), Reason.PLAN),  # missed before
        (Expected(KIND, KIND, SIZE), Reason.PEAK),
        (Expected(KIND, KIND, SIZE, status=PlanState.MEASURED), Reason.TIME),
        (Expected(KIND, KIND, SIZE, status=PlanState.TIMED), None),
        (Expected(KIND, KIND, SIZE, status=PlanState.TIMED, may_grow=True), Reason.AGAIN),
        (Expected(OTHER, KIND, SIZE, status=PlanState.TIMED, may_grow=True), None),  # has not come so often
    ],
)
def test_each_step_has_its_reason_to_be_watched(expected, reason):
    policy, history = WatchPolicy(Clock()), History()
    expected = among(history, expected)
    for _ in range(8):
        look = policy.step_begins(among(history, Expected(KIND, KIND, SIZE, status=PlanState.TIMED)))
        policy.step_ended(look, history[KIND])
    policy.missed(history[OTHER])
    assert policy.reason(expected) is reason
    assert policy.reason(expected) is reason, "a query changes nothing"
    is_timed = reason is Reason.TIME
    watch = Watch.NOTHING if reason is None else Watch.TIME if is_timed else Watch.MEASURE
    assert policy.step_begins(expected).watch is watch


def test_a_steady_kind_is_settled_in_three_steps():
    training = Training()
    assert [training.step(KIND).value for _ in range(5)] == ["measure", "measure", "time", "nothing", "nothing"]


@pytest.mark.parametrize("seed", range(12))
def test_watching_takes_one_percent_of_random_cycles(seed):
    rng = random.Random(seed)
    kinds = [(number,) for number in range(rng.randrange(1, 7))]
    order = [rng.choice(kinds) for _ in range(rng.randrange(1, 12))]
    kinds_by_chance = seed % 3 == 0
    training = Training(rng.choice((0.1, 0.4, 0.8)), sees_frees=rng.random() < 0.5)
    for kind in islice(cycle(order), 3000):
        training.step(rng.choice(kinds) if kinds_by_chance else kind)
    seen = set(kinds if kinds_by_chance else order)
    assert training.planned.keys() == seen
    if not kinds_by_chance:
        assert all(has_peak and has_time for has_peak, has_time in training.planned.values())
    assert worst_share(training.seconds[STEPS:]) <= SHARE
    assert training.measured <= 16 * len(seen) + 3000 * SHARE / 0.1


def test_plans_made_anew_after_the_first_steps_are_measured_within_one_percent():
    training = Training(extra_s=1.0)
    for index in range(3000):
        training.step(KIND)
        if index % 100 == 0 and index < 2000:
            training.planned[KIND] = False, False
            training.policy.planned(training.history[KIND])
    assert worst_share(training.seconds[STEPS:]) <= SHARE
    assert training.planned[KIND] == (True, True)


def test_a_cycle_of_adversarial_training_is_planned():
    training = Training()
    for kind in islice(cycle([KIND] * 5 + [OTHER]), 60):
        training.step(kind)
    assert training.planned == {KIND: (True, True), OTHER: (True, True)}
    assert training.measured <= 20


def test_sizes_that_grow_for_ever_are_not_measured_for_ever():
    training = Training()
    for size_bytes in range(1, 1500):
        training.step((size_bytes,), size_bytes)
    assert training.measured <= FREE_TO_PLAN + 2 * 1500 * SHARE


def test_a_kind_is_measured_twice_to_see_what_it_frees():
    training = Training(extra_s=0.01, sees_frees=False)
    watched = [training.step(KIND).value for _ in range(40)]
    assert training.planned[KIND] == (True, True)
    again = [index for index, watch in enumerate(watched) if watch in ("measure", "glance") and index > 4]
    assert len(again) == 4, "twice two in a row, after 8 steps and after 16"
    assert again[1] == again[0] + 1
    assert again[3] == again[2] + 1


def test_a_dear_look_waits_until_it_is_one_percent_of_the_time():
    """Each takes as long as 20 steps: four times what watching may take of 500 steps, be it only a glance."""
    training = Training(extra_s=20.0)
    for _ in range(12_000):
        training.step(KIND)
    looks = [index for index, (_, extra_s) in enumerate(training.seconds) if extra_s]
    later = looks[-3:]
    assert later[0] > 500
    assert all(b - a >= 20 / SHARE for a, b in pairwise(looks[5:]))  # the first glance is seen to be dear


def test_where_looks_are_dear_glances_keep_to_one_percent():
    """A look takes as long as 20 steps, and a glance as long as one."""
    training = Training(extra_s=20.0, glance_s=1.0)
    watched = [training.step(KIND) for _ in range(6000)]
    later = watched[STEPS:]
    assert later.count(Watch.MEASURE) == 0
    assert later.count(Watch.GLANCE) >= 4
    assert worst_share(training.seconds[STEPS:]) <= SHARE


def test_what_failed_is_not_counted():
    policy = WatchPolicy(Clock())
    policy.step_begins(Expected(None, None, SIZE))  # and does not end
    policy.account_for_last_step()
    assert policy.step_begins(Expected(None, None, SIZE)).watch is Watch.MEASURE


def test_a_state_with_a_higher_predicted_peak_is_measured_at_its_third_step():
    policy, kind = WatchPolicy(lambda: 0.0), History()[KIND]
    policy.step_ended(policy.step_begins(Expected(kind, kind, SIZE)), kind, Saw.PEAK)
    higher = Expected(kind, kind, SIZE, status=PlanState.TIMED, is_higher=True)
    found = []
    for _ in range(3):
        look = policy.step_begins(higher)
        found.append(look.watch)
        policy.step_ended(look, kind)
    assert found == [Watch.NOTHING, Watch.NOTHING, Watch.MEASURE]
