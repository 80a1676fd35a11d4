"""Methods compared: the simulator judges, bounds hold for all, and the table and the picture show what was found."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from hiremate_lightning.command_line.arguments import read_budgets, read_methods
from hiremate_lightning.command_line.comparisons import spread
from hiremate_lightning.errors import BudgetError, ConfigurationError
from hiremate_lightning.planning import comparing
from hiremate_lightning.planning.comparing import Comparison, Outcome, methods_to_compare, outcome_of, proven_ms
from hiremate_lightning.planning.solvers.base import Problem, Solution, Status, get_strategy, replay, strategy_names
from hiremate_lightning.records.schedule import keep_all
from hiremate_lightning.reporting.svg_report import lay_out, methods_panel, panel_of, panel_svg
from hiremate_lightning.units import Budget
from tests.helpers import problem_of
from tests.tiny import transformer

KIB = 1024


def outcome(method: str, budget: int, ms: float = 10.0, **more: object) -> Outcome:
    values = {"fits": True, "peak_bytes": budget - 5, "bound_ms": 0.0, "status": Status.FEASIBLE, "solve_s": 1.0}
    return Outcome(
        method, budget_bytes=budget, method=method, recompute_ms=ms, stopped_by="proof", **{**values, **more}
    )


@pytest.fixture(scope="module")
def problem() -> Problem:
    step = transformer(3)
    whole = problem_of(step, 0, time_limit_s=3.0)
    plain = replay(whole, keep_all(whole.graph)).peak_bytes
    return replace(whole, budget_bytes=plain * 80 // 100)


def test_each_method_is_judged_by_the_simulator(problem: Problem):
    for method in ("portfolio", "segments"):
        o = outcome_of(problem, method)
        assert o.method == method
        assert o.fits
        assert 0 < o.peak_bytes <= problem.budget_bytes
        solved = get_strategy(o.method)(problem)
        assert replay(problem, solved.recompute).recompute_ms == pytest.approx(solved.recompute_ms)


def test_a_method_without_a_valid_schedule_does_not_fit(problem: Problem, monkeypatch: pytest.MonkeyPatch):
    found = outcome_of(replace(problem, budget_bytes=1), "segments")
    assert (found.fits, found.peak_bytes, found.recompute_ms) == (False, 0, 0.0)
    boast = Solution("boaster", Status.OPTIMAL, keep_all(problem.graph), 0.0, 1, stopped_by="proof")
    monkeypatch.setattr(comparing, "apart", lambda name: lambda asked: boast)
    found = outcome_of(problem, "boaster")
    assert not found.fits
    assert found.peak_bytes > problem.budget_bytes


def test_the_bound_is_below_what_any_method_finds(problem: Problem):
    bound_ms = proven_ms(problem)
    assert bound_ms is not None
    assert all(
        bound_ms <= o.recompute_ms + 1e-6 for o in (outcome_of(problem, method) for method in ("portfolio", "hilp"))
    )
    assert proven_ms(replace(problem, budget_bytes=1)) is None, "what nothing fits is proven impossible"


def test_a_bound_of_one_method_holds_for_all_and_for_less():
    """Impossible budgets are those below a proof; the fastest comes first, and what does not fit last."""
    found = Comparison(100.0, (outcome("a", 80, 4.0, bound_ms=3.0), outcome("b", 50, 9.0)), ((50, 1.0),))
    assert [found.bound_ms(budget) for budget in (80, 50, 90)] == [3.0, 3.0, 0.0]
    assert found.distance(found.outcomes[1]) == pytest.approx(0.06)
    assert found.budgets == [80, 50]
    found = Comparison(100.0, (outcome("a", 20, status=Status.INFEASIBLE, fits=False),), ((10, None), (30, 2.0)))
    assert [budget for budget in found.budgets if found.is_impossible(budget)] == [20, 10]
    rows = (outcome("slow", 50, 9.0), outcome("none", 50, 0.0, fits=False), outcome("fast", 50, 2.0))
    assert [o.method for o in Comparison(100.0, rows).under(50)] == ["fast", "slow", "none"]


def test_all_methods_are_compared_but_plain_training():
    assert set(methods_to_compare()) == set(strategy_names()) - {"none"}
    assert read_methods("segments, hilp,segments") == ("segments", "hilp")


@pytest.mark.parametrize(
    ("read", "text", "kind", "words"),
    [
        (read_methods, "luck", ConfigurationError, "Unknown solver 'luck'"),
        (read_methods, " , ", ConfigurationError, "--methods names none"),
        (read_budgets, "60%,7", BudgetError, "7"),
    ],
)
def test_methods_and_budgets_that_make_no_sense_are_refused(read, text, kind, words):
    with pytest.raises(kind, match=words):
        read(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("60%", (Budget(share=0.6),)),
        ("70%, 50%,70%", (Budget(share=0.7), Budget(share=0.5))),
        ("12,884,901,888 B,auto", (Budget(size_bytes=12_884_901_888), Budget())),
    ],
)
def test_budgets_are_read_one_by_one(text: str, expected: tuple[Budget, ...]):
    assert read_budgets(text) == expected


def test_the_picture_has_a_line_for_each_method():
    rows = (outcome("a", 80, 4.0), outcome("a", 50, 20.0), outcome("b", 80, 5.0), outcome("b", 50, fits=False))
    panel = panel_of(Comparison(100.0, rows, ((80, 1.0), (50, None))), ["a", "b"], "Net <3", 20, 100)
    points = {series.name: series.points for series in panel.series}
    assert points == {
        "a": ((70, 0.2), (100, 0.04)),
        "b": ((100, 0.05),),
        "plain training": ((120, 0.0),),
        "proven: nothing is faster": ((100, 0.01), (120, 0.0)),
    }
    picture = ElementTree.fromstring(panel_svg(panel, "Net"))
    marks, words = (
        ["".join(e.itertext()) for e in picture.iterfind(f"{{*}}{p}")] for p in ("path/{*}title/..", "text")
    )
    assert marks == ["a: +20.0 %", "a: +4.0 %", "b: +5.0 %"]
    assert {"Net <3", "a", "b", "plain training", "proven: nothing is faster"} <= set(words)


def test_numbers_beside_the_axis_do_not_overlap():
    rows = (outcome("a", 80, 400.0),)
    picture = ElementTree.fromstring(panel_svg(panel_of(Comparison(100.0, rows), ["a"], "Net", 0, 100), "Net"))
    numbers = [e for e in picture.iterfind("{*}text") if e.attrib.get("text-anchor") == "end"]
    heights = [float(e.attrib["y"]) for e in numbers]
    assert [e.text for e in numbers][:3] == ["0", "1", "10"]
    assert all(below - above >= 11 for below, above in pairwise(heights))


def test_a_picture_of_nothing_but_plain_training_is_drawn():
    panel = panel_of(Comparison(0.0), ["a"], "Net", 0, 100 * KIB)
    assert panel.series[0].points == ()
    ElementTree.fromstring(panel_svg(panel, "Net"))
    assert spread(50, 100) == [90, 80, 70, 60], "a picture spreads budgets up to plain training"
    panels = (methods_panel("", {f"method number {i}": () for i in range(count)}, (), (1, 0)) for count in (1, 20))
    (_, one), (_, more) = (lay_out(panel.keys, 0, 760) for panel in panels)
    assert more >= 3 * one, "a legend takes as many rows as it needs"
