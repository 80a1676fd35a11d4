"""Plans on disk: found again, checked before they are used, ignored where they are not what they should be."""

from __future__ import annotations

import json
import logging
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

from hiremate_lightning import get_plan, hiremate
from hiremate_lightning.planning.solutions import Solutions, remembering
from hiremate_lightning.planning.solvers.base import get_strategy
from tests.helpers import problem_of
from tests.tiny import transformer


@pytest.fixture
def solved(tmp_path):
    problem = problem_of(transformer(4), 2_600_000)
    solution = get_strategy("portfolio")(problem)
    Solutions(tmp_path).write(problem, "portfolio", solution)
    return problem, solution, next(tmp_path.iterdir())


def test_a_kept_plan_is_found_by_budget_solver_graph_and_memory(solved, tmp_path):
    problem, solution, _ = solved
    files, (graph, profile) = Solutions(tmp_path), transformer(4)
    more = replace(profile, workspace_bytes=tuple(size + 1 for size in profile.workspace_bytes))
    assert files.read(problem, "portfolio") == (solution, problem.profile)
    assert files.read(problem, "hilp") is None
    for other in (problem_of(transformer(4), 2_600_001), problem_of(transformer(5), 2_600_000)):
        assert files.read(other, "portfolio") is None
    assert files.read(problem_of((graph, more), 2_600_000), "portfolio") is None


def with_solution(data, **changes):
    return json.dumps({**data, "solution": {**data["solution"], **changes}})


def of_another_graph(data):
    costs = {name: value[:-1] if isinstance(value, list) else value for name, value in data["profile"].items()}
    return json.dumps({**data, "profile": costs})


SPOILT = {
    "cut off": (lambda data: json.dumps(data)[:-40], ""),
    "of another version": (lambda data: json.dumps({**data, "format": 0}), "it was written by another version"),
    "that recomputes nothing": (
        lambda data: with_solution(data, recompute=[[] for _ in data["solution"]["recompute"]]),
        "its schedule takes",
    ),
    "that lies about its peak": (lambda data: with_solution(data, peak_bytes=1), "bytes, where it says 1"),
    "with a row too few": (lambda data: with_solution(data, recompute=data["solution"]["recompute"][:-3]), ""),
    "of another graph": (of_another_graph, "its profile is of another graph"),
    "of another kind": (lambda _: "[1, 2]", ""),
}


@pytest.mark.parametrize(("spoil", "words"), SPOILT.values(), ids=SPOILT)
def test_a_spoiled_file_is_ignored_with_a_warning(solved, tmp_path, caplog, spoil, words):
    problem, _, path = solved
    path.write_text(spoil(json.loads(path.read_text())))
    with caplog.at_level(logging.WARNING, "hiremate_lightning"):
        assert Solutions(tmp_path).read(problem, "portfolio") is None
    assert f"Ignored the plan in {path}" in caplog.text
    assert words in caplog.text


def test_a_folder_that_cannot_be_written_warns(tmp_path, caplog):
    problem = problem_of(transformer(2), 1_500_000)
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "hiremate_lightning"):
        Solutions(tmp_path / "file").write(problem, "portfolio", get_strategy("portfolio")(problem))
    assert "the next run solves again" in caplog.text


def test_a_remembered_solution_holds_no_listener():
    class Reporter:
        def heard(self, best_ms: float, bound_ms: float) -> None:
            """Hear of a better schedule."""

    reporter = Reporter()
    problem = problem_of(transformer(2), 1_500_000, progress=reporter.heard)
    assert remembering(get_strategy("segments"), "portfolio")(problem).is_feasible
    left = weakref.ref(reporter)
    del reporter, problem
    assert left() is None


def test_a_second_run_neither_profiles_nor_solves(tmp_path):
    """What it measured and solved would be written."""

    def run():
        torch.compiler.reset()
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6)))
        hiremate(model, "70%", cache_dir=tmp_path, verbose=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(4096, 32)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        written = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir() if not path.name.startswith("wait")}
        return get_plan(model), [p.detach().clone() for p in model.parameters()], written

    first, expected, kept = run()
    second, found, kept_again = run()
    assert kept_again == kept
    assert second.solution == first.solution
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
