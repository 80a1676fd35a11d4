"""The memory monitor: whole steps are measured, and a warning names what no plan foresaw."""

from __future__ import annotations

import pickle
import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from hiremate_lightning import ConfigurationError, HiRemateWarning, hiremate
from hiremate_lightning.callbacks import MemoryMonitor
from hiremate_lightning.memory.metering import MemoryMeter
from tests.behaviour.integrations.test_callback import ROWS, WIDTH, CallsItself, Validates, batches, planned
from tests.behaviour.integrations.test_metrics import Notebook
from tests.exact import recorded
from tests.trainers import quiet_trainer

STEPS = 24
MEGABYTE = 10**6


class Lean(CallsItself):
    """Its optimizer has no state and makes nothing large."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2, foreach=False)


class Spill(Callback):
    """Allocates something large in one hook, at one step."""

    def __init__(self, hook: str, size_bytes: int = 20 * MEGABYTE, at: int = 20) -> None:
        self.size_bytes, self.at = size_bytes, at
        setattr(self, hook, self._allocate)

    def _allocate(self, run: pl.Trainer, *_: Any) -> None:
        if run.fit_loop.epoch_loop.batch_idx == self.at:
            torch.empty(self.size_bytes, dtype=torch.uint8)


def fit(*callbacks: Callback, kind: type[pl.LightningModule] = Lean, steps: int = STEPS, **options: Any) -> pl.Trainer:
    torch.manual_seed(5)
    run = quiet_trainer(*callbacks, log_every_n_steps=1, **options)
    run.fit(kind(), batches(steps))
    return run


@pytest.mark.parametrize("monitor_first", [False, True])
def test_the_peak_of_a_whole_step_is_the_predicted_one(monitor_first: bool):
    planning, monitor = planned(), MemoryMonitor(every_n_steps=4)
    fit(*((monitor, planning) if monitor_first else (planning, monitor)))
    assert planning.plan is not None
    assert monitor.peak_bytes == pytest.approx(planning.plan.planned_peak_bytes, rel=0.02)
    assert monitor.peak_bytes == pytest.approx(planning.plan.measured.peak_bytes, rel=0.02)


def test_planning_measures_what_it_measures_without_a_monitor(tmp_path):
    found = []
    for monitors in ((), (MemoryMonitor(every_n_steps=1),)):
        planning = planned(cache_dir=tmp_path)  # the same plan both times
        fit(planning, *monitors)
        assert planning.plan is not None
        assert planning.plan.measured.overhead is not None
        found.append(planning.plan.measured.peak_bytes)
    assert found[0] == found[1]


def test_without_a_plan_peaks_are_measured_and_not_compared():
    monitor = MemoryMonitor(every_n_steps=2)
    fit(monitor, Spill("on_after_backward"), steps=23)
    activations = 2 * 4 * ROWS * WIDTH * 4  # of eight layers, the least that a plain step keeps
    assert monitor.peak_bytes is not None
    assert monitor.peak_bytes > activations
    assert monitor.highest_bytes is not None
    assert monitor.highest_bytes < 20 * MEGABYTE  # step 20 is recorded only to know what is freed in the next one


ABOVE = r"reached .* MiB in {}, .* above the budget\. "
WITHIN = r"above the plan and within the budget\. Something outside"
SPILLS: dict[str, tuple[str, list[Spill], str]] = {  # a budget, what allocates beside the plan, and the one warning
    "in the backward": ("85%", [Spill("on_before_backward")], ABOVE.format("the backward")),
    "after the backward": ("85%", [Spill("on_after_backward")], ABOVE.format("what follows the backward")),
    "in the update": ("85%", [Spill("on_before_optimizer_step")], ABOVE.format("the optimizer's step")),
    "in the backward, three times": ("85%", [Spill("on_before_backward", at=at) for at in (18, 19, 20)], "above"),
    "within the budget": ("1 GiB", [Spill("on_before_backward", 3 * MEGABYTE)], WITHIN),
}


@pytest.mark.parametrize(("budget", "spills", "words"), SPILLS.values(), ids=SPILLS)
def test_an_unplanned_allocation_names_its_line_once(budget: str, spills: list[Spill], words: str):
    with recorded() as warned:
        fit(planned(budget), MemoryMonitor(every_n_steps=1), *spills)
    (text,) = warned
    assert re.search(words, text)


@pytest.mark.parametrize(
    ("budget", "options", "spill", "kind"),
    [
        ("1 GiB", {"tolerance": 100.0}, Spill("on_before_backward", 3 * MEGABYTE), Lean),
        ("85%", {}, Spill("on_validation_batch_start"), Validates),
    ],
    ids=["tolerated", "in a validation"],
)
def test_tolerated_spills_and_validations_give_no_warning(budget, options, spill, kind):
    fit(planned(budget), MemoryMonitor(every_n_steps=1, **options), spill, kind=kind)  # a warning would be an error


def test_loggers_get_the_peak_of_each_measured_step():
    notebook, monitor = Notebook(), MemoryMonitor(every_n_steps=5)
    fit(planned(), monitor, logger=notebook)
    pages = [(step, page["hiremate/step_peak_bytes"]) for step, page in notebook.pages if len(page) == 1]
    assert [step for step, _ in pages] == [4, 9, 14, 19]  # counted from 0
    assert pages[-1][1] == monitor.peak_bytes


def test_a_model_planned_before_is_compared_with_its_plan():
    module = hiremate(Lean(), budget="85%", verbose=False)
    run = quiet_trainer(MemoryMonitor(every_n_steps=1), Spill("on_before_backward"))
    with pytest.warns(HiRemateWarning, match="above the budget"):
        run.fit(module, batches(STEPS))


def test_no_measurement_is_left_behind_by_an_exception():
    class Fails(Lean):
        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            if index == 3:
                raise RuntimeError("stop")
            return super().training_step(batch, index)

    with pytest.raises(RuntimeError, match=r"^stop$"):
        fit(MemoryMonitor(every_n_steps=1), kind=Fails)
    assert not MemoryMeter._running


def test_another_profiler_is_left_alone_with_a_warning():
    monitor = MemoryMonitor(every_n_steps=1)
    activities = [torch.profiler.ProfilerActivity.CPU]
    warned = pytest.warns(HiRemateWarning, match=r"^Another profiler is running")
    with torch.profiler.profile(activities=activities, acc_events=True), warned:
        fit(monitor, steps=3)
    assert monitor.peak_bytes is None


def test_by_default_few_steps_are_measured_on_a_cpu():
    monitor = MemoryMonitor()
    fit(monitor)
    assert monitor.peak_bytes is None
    assert isinstance(monitor, Callback)
    assert pickle.loads(pickle.dumps(MemoryMonitor(every_n_steps=3))).every_n_steps == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every_n_steps": 0}, "every_n_steps must be at least 1, found 0"),
        ({"tolerance": -1.0}, "tolerance must be at least 0, found -1.0"),
    ],
)
def test_arguments_out_of_range_are_refused(options: dict[str, Any], words: str):
    with pytest.raises(ConfigurationError, match=words):
        MemoryMonitor(**options)
