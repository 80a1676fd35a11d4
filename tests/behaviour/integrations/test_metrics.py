"""Metrics of a plan: which, under which names, in which units."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger

from hiremate_lightning.reporting.plan_summary import plan_metrics
from tests.behaviour.integrations.test_callback import CallsItself, batches, planned
from tests.tiny import blocks_plan
from tests.trainers import quiet_trainer

PREDICTED = {
    "hiremate/budget_bytes": 3_972_000,
    "hiremate/resident_bytes": 2_000_000,
    "hiremate/unplanned_peak_bytes": 5_744_000,
    "hiremate/planned_peak_bytes": 3_872_000,
    "hiremate/predicted_overhead": 9.0 / 53.6,
    "hiremate/gap": 0.0,
    "hiremate/planning_s": 1.95,
    "hiremate/plans": 2,
}


def test_what_was_measured_stands_beside_what_was_predicted():
    """Every metric is a number that a logger takes."""
    plan = blocks_plan(4)
    assert plan_metrics(plan, plans=2) == pytest.approx(PREDICTED)
    assert {type(value) for value in plan_metrics(plan).values()} == {float}
    plan = plan.with_measured(peak_bytes=3_800_000, step_ms=110.0, recompute_ms=10.0)
    measured = {"hiremate/measured_peak_bytes": 3_800_000, "hiremate/measured_overhead": 0.1}
    assert plan_metrics(plan, plans=2) == pytest.approx({**PREDICTED, **measured})


class Notebook(DummyLogger):
    """Writes down what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.pages: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:  # type: ignore[override]
        self.pages.append((step, {k: v for k, v in metrics.items() if k.startswith("hiremate/")}))


def test_every_logger_gets_the_plan_and_then_what_was_measured(tmp_path: Path):
    callback, notebook = planned(), Notebook()
    file = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    quiet_trainer(callback, logger=[notebook, file], log_every_n_steps=1).fit(CallsItself(), batches(6))
    pages = [(step, page) for step, page in notebook.pages if page]
    plan = callback.plan
    assert plan is not None
    before = plan_metrics(plan.with_measured(peak_bytes=None, step_ms=None, recompute_ms=None))
    assert set(pages[0][1]) >= set(before)
    assert pages[-1][1] == plan_metrics(plan)
    assert pages[-1][1]["hiremate/measured_peak_bytes"] <= pages[-1][1]["hiremate/budget_bytes"]
    assert [step for step, _ in pages] == sorted({step for step, _ in pages})  # at most once a step
    with Path(file.log_dir, "metrics.csv").open() as stream:
        rows = [row for row in csv.DictReader(stream) if row.get("hiremate/plans")]
    assert [int(row["step"]) for row in rows] == [step for step, _ in pages]


def test_the_metrics_of_the_model_stay_what_they_are():
    pages = []
    for callbacks in ((), (planned(),)):
        run = quiet_trainer(*callbacks, logger=DummyLogger(), log_every_n_steps=1)
        run.fit(CallsItself(), batches())
        pages.append(set(run.logged_metrics))
    assert pages[0] == pages[1]
