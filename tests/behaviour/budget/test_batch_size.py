"""The batch that is found has run within the budget, is as large as planning allows, and the search leaves no trace."""

from __future__ import annotations

import copy
import gc
import json
import random
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from hiremate_lightning import (
    BatchSizeResult,
    BudgetError,
    ConfigurationError,
    InfeasibleBudgetError,
    find_max_batch_size,
    get_plan,
    hiremate,
    remove_hiremate,
    testing,
)
from hiremate_lightning.memory.metering import measure_peak
from hiremate_lightning.sizes.batch_size import CAUTION, SizeFinder
from hiremate_lightning.targets.modules import targets_of
from tests.exact import assert_same, network, quiet, take_steps
from tests.models import GPT, UNet
from tests.processes import run_two
from tests.training import resident_bytes

MiB = 2**20
MAX_STEPS = 6


@dataclass
class Case:
    """What a search needs."""

    model: nn.Module
    make_batch: Callable[[int], torch.Tensor]
    optimizer: torch.optim.Optimizer
    steps: int = 0

    def step(self, model: nn.Module, batch: torch.Tensor) -> None:
        self.steps += 1
        self.optimizer.zero_grad()
        model(batch).square().mean().backward()
        self.optimizer.step()

    def find(self, budget: int | str | None, **options) -> BatchSizeResult:
        options = {"time_limit_s": 0.3, "verbose": False, **options}
        return find_max_batch_size(self.model, self.make_batch, self.step, budget=budget, **options)


def case_of(model: nn.Module, make_batch: Callable[[int], torch.Tensor]) -> Case:
    return Case(model, make_batch, torch.optim.AdamW(model.parameters(), lr=1e-3))


def layers(width: int = 32, depth: int = 2) -> Case:
    """A chain with dropout and batch norm, whose activations outweigh its weights."""
    block = [nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.2)]
    model = nn.Sequential(*(copy.deepcopy(layer) for _ in range(depth) for layer in block), nn.Linear(width, 4))
    return case_of(model, lambda n: torch.randn(n, width))


def pictures(side: int) -> Callable[[int], torch.Tensor]:
    return lambda n: torch.randn(n, 3, side, side)


FIRST_TRY = 4  # real steps of a search whose first choice holds: two samples, a step to plan, one under its plan
REAL = {
    "gpt": (lambda: case_of(GPT(blocks=2, width=64), lambda n: torch.randint(256, (n, 128))), "24 MiB"),
    "unet": (lambda: case_of(UNet(width=8, depth=2), pictures(64)), "20 MiB"),
}


def measured_peak(case: Case, size: int, budget: int | str, steps: int = 4) -> int:
    """Train under a plan, and measure the peak of the last step from outside."""
    case.model.zero_grad()
    hiremate(case.model, budget, optimizer=case.optimizer, verbose=False, time_limit_s=2)
    peak = 0
    for _ in range(steps):
        batch = case.make_batch(size)
        case.optimizer.zero_grad()
        gc.collect()
        resident = resident_bytes(case.model, case.optimizer, (batch,))
        peak = resident + measure_peak(lambda batch=batch: case.model(batch).square().mean().backward())
        case.optimizer.step()
    return peak


def assert_a_little_more_does_not_fit(result: BatchSizeResult, max_overhead: float) -> None:
    """A size at most a twentieth larger, or the next one, was planned and refused.

    Where a size took more time than was predicted of it, which its real step shows, the search goes on for less.
    """
    more = [t for t in result.trials if int(result) < t.size <= max(int(result) + 1, 1.05 * int(result))]
    aim = max_overhead if result.real_steps <= FIRST_TRY else CAUTION * max_overhead
    assert any(not t.fits or t.overhead > aim for t in more), [(t.size, t.overhead) for t in result.trials]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(REAL))
def test_on_real_models_the_size_is_over_twice_that_of_eager(name):
    build, budget = REAL[name]
    case = build()

    result = case.find(budget, max_overhead=0.4, time_limit_s=1)

    trial = result.trial
    assert case.steps == result.real_steps <= MAX_STEPS
    assert trial.measured_peak_bytes <= result.budget_bytes
    assert abs(trial.predicted_peak_bytes - trial.measured_peak_bytes) <= 0.02 * trial.measured_peak_bytes
    assert trial.overhead <= 0.4
    assert int(result) >= 2 * result.unplanned_size > 0
    assert_a_little_more_does_not_fit(result, max_overhead=0.4)
    assert measured_peak(case, int(result), budget) <= result.budget_bytes
    remove_hiremate(case.model)
    plain = case.make_batch(int(result) // 2 + 1)
    resident = resident_bytes(case.model, case.optimizer, (plain,))
    assert resident + measure_peak(lambda: case.step(case.model, plain)) > result.budget_bytes


def test_the_largest_size_fits_and_a_larger_one_does_not(capfd, tmp_path: Path):
    """The search says so, and its result is saved with its curve."""
    torch.manual_seed(0)
    case = layers()
    result = case.find("4 MiB", max_overhead=9.0, verbose=True)

    printed = capfd.readouterr().err
    assert f"largest size within 4.00 MiB is {int(result)}" in printed
    assert "verified" in printed
    assert f"{result.real_steps} real steps" in printed
    assert case.steps == result.real_steps <= MAX_STEPS
    assert result.trial.measured_peak_bytes <= result.budget_bytes == 4 * MiB
    assert int(result) == result.size > result.unplanned_size > 0
    assert result.limited_by == "memory"
    assert_a_little_more_does_not_fit(result, max_overhead=9.0)

    result.save(tmp_path / "sizes.json")
    saved = json.loads((tmp_path / "sizes.json").read_text())
    assert saved["size"] == int(result)
    assert [t["size"] for t in saved["trials"]] == sorted({t.size for t in result.trials})
    assert {"predicted_peak_bytes", "overhead", "samples_per_s", "measured_peak_bytes"} <= set(saved["trials"][0])

    hiremate(case.model, result.budget_bytes, on_infeasible="warn", verbose=False, time_limit_s=2)
    with quiet():
        plan = take_steps(case.model, lambda _: case.make_batch(int(1.2 * int(result))), 2, clears="never")
    assert plan.planned_peak_bytes > result.budget_bytes


def snapshot(case: Case) -> dict[str, object]:
    optimizer = case.optimizer.state_dict()
    return copy.deepcopy(
        {
            "weights": case.model.state_dict(),
            "gradients": [p.grad for p in case.model.parameters()],
            "optimizer": optimizer["state"],
            "groups": optimizer["param_groups"],
            "modes": [m.training for m in case.model.modules()],
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state()[1],  # noqa: NPY002
            "python": random.getstate(),
        }
    )


@pytest.mark.parametrize(("steps_before", "fails"), [(0, False), (2, False), (0, True)])
def test_everything_is_as_it_was_before(steps_before, fails):
    """Also where a step fails."""
    case = layers()
    scheduler = torch.optim.lr_scheduler.StepLR(case.optimizer, 1, 0.5)
    for _ in range(steps_before):
        case.step(case.model, case.make_batch(8))
    before = snapshot(case)

    def step(model: nn.Module, batch: torch.Tensor) -> None:
        random.random(), np.random.rand()  # noqa: NPY002
        case.step(model, batch)
        scheduler.step()
        if fails and len(batch) > 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        find_max_batch_size(
            case.model, case.make_batch, step, budget="4 MiB", stateful=[scheduler], verbose=False, time_limit_s=0.3
        )

    assert_same(snapshot(case), before)
    assert targets_of(case.model) is None
    assert scheduler.last_epoch == 0


def test_the_largest_allowed_is_never_passed():
    case = layers()

    result = case.find("64 MiB", max_val=9)

    assert (int(result), result.limited_by) == (9, "the largest size allowed")


def test_validation_counts():
    case = layers()

    def validate(model: nn.Module, batch: torch.Tensor) -> None:
        model.eval()
        kept = [model(batch).repeat(1, 400)]
        model.train()
        del kept

    without = case.find("8 MiB", max_val=2000, max_overhead=9.0)
    result = case.find("8 MiB", max_val=2000, max_overhead=9.0, validate=validate)

    assert int(result) < int(without)
    assert result.limited_by == "memory of validation"


def test_validation_that_grows_late_is_foreseen_once_it_was_seen():
    """Validation takes little in all samples, and far more than the budget at the first size that is forecast."""
    case = layers()
    seen = dict[int, int]()

    def validate(model: nn.Module, batch: torch.Tensor) -> None:
        seen[len(batch)] = 2**16 * max(0, len(batch) - 500)
        torch.empty(seen[len(batch)], dtype=torch.uint8)

    result = case.find("8 MiB", max_val=900, max_overhead=9.0, validate=validate)

    assert max(seen.values()) > 8 * MiB
    assert 500 < int(result) < 900
    assert seen[int(result)] <= 8 * MiB
    assert result.trial.measured_peak_bytes <= 8 * MiB


def test_any_number_that_the_batch_grows_with_can_be_searched():
    model = GPT(blocks=2, width=64, context=4096)
    case = case_of(model, lambda n: torch.randint(256, (2, n)))

    result = case.find("24 MiB", init_val=32, max_val=4096)

    assert 32 < int(result) < 4096
    assert result.trial.measured_peak_bytes <= result.budget_bytes


def test_a_planned_model_gives_its_budget_and_stays_planned():
    case = layers()
    hiremate(case.model, "4 MiB", optimizer=case.optimizer, verbose=False, time_limit_s=1)
    case.step(case.model, case.make_batch(2))

    result = case.find(None)

    assert result.budget_bytes == 4 * MiB
    before = testing.runs(case.model)
    for _ in range(3):
        case.step(case.model, case.make_batch(int(result)))
    assert testing.runs(case.model) == before + 3
    assert get_plan(case.model).planned_peak_bytes <= 4 * MiB


@pytest.mark.parametrize(
    ("options", "kind", "expected"),
    [
        ({"init_val": 0}, ConfigurationError, "init_val must be at least 1, found 0"),
        ({"init_val": 8, "max_val": 4}, ConfigurationError, "max_val must be at least init_val, 8, found 4"),
        ({"solver": "none such"}, ConfigurationError, "Unknown solver"),
        ({"budget": "60%"}, BudgetError, "no batch is the largest"),
        ({"budget": 0.5}, BudgetError, "no batch is the largest"),
    ],
)
def test_arguments_out_of_range_are_named_before_anything_runs(options, kind, expected):
    case = layers()

    with pytest.raises(kind, match=re.escape(expected)):
        case.find(**{"budget": "4 MiB", **options})

    assert not case.steps


@network(lambda: {"net": nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))})
def fickle(self, x: torch.Tensor) -> torch.Tensor:
    """A model that computes something else at each size."""
    for _ in range(1 + len(x) % 11):
        x = self.net(x)
    return x


def twice(case: Case) -> Callable[..., None]:
    return lambda *given: [case.step(*given) for _ in range(2)]


@pytest.mark.parametrize(
    ("make", "step", "options", "words"),
    [
        (lambda: case_of(layers().model, lambda n: torch.randn(64, 32)), None, {}, "its tensors are the same"),
        (
            lambda: case_of(fickle(), lambda n: torch.randn(n, 32)),
            *(None, {}, r"it is not the same graph: .*aten"),
        ),
        (
            lambda: case_of(layers().model, lambda n: torch.randn(8192 * n, 32)),
            *(None, {"budget": "7 MiB", "max_overhead": 0.0}),
            r"Even size 1 takes an overhead of .* Raise the budget or max_overhead",
        ),
        (
            layers,
            lambda case: lambda model, batch: model(batch),
            {},
            "one forward and one backward of the model, found none",
        ),
        (layers, twice, {}, "one forward and one backward of the model, found more"),
    ],
    ids=["one size", "another graph at another size", "too slow", "no backward", "two backwards"],
)
def test_a_step_that_can_not_be_scaled_is_refused(make, step, options, words):
    case = make()

    with pytest.raises(ConfigurationError, match=words):
        find_max_batch_size(
            case.model,
            case.make_batch,
            step(case) if step else case.step,
            **{"budget": "4 MiB", "time_limit_s": 0.3, "verbose": False, **options},
        )


def test_a_step_special_at_the_first_size_is_scaled_from_others():
    case = layers()

    @network(lambda: {"net": case.model, "special": nn.Linear(32, 32)})
    def special(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.special(x).sin() if len(x) < 3 else self.special(x))

    result = case_of(special(), case.make_batch).find("4 MiB")

    assert result.trial.measured_peak_bytes <= result.budget_bytes
    assert result.real_steps <= MAX_STEPS


def test_a_budget_too_small_for_one_sample_names_the_smallest():
    case = case_of(nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)), lambda n: torch.randn(n, 512))

    with pytest.raises(InfeasibleBudgetError, match="Not even size 1 fits") as caught:
        case.find("1 MiB")

    assert caught.value.smallest_bytes > MiB
    assert "can't allocate memory" in caught.value.args[0], "batch-size finders look for these words"


def test_a_search_of_which_no_size_holds_says_so(monkeypatch):
    def fails(finder: SizeFinder, size: int) -> bool:
        finder._runner.steps = MAX_STEPS
        finder._failed.update(finder._runner.seen)
        return False

    monkeypatch.setattr(SizeFinder, "_holds", fails)
    with pytest.raises(ConfigurationError, match="No size was found in 6 real steps: the predictions for sizes"):
        layers().find("4 MiB", max_overhead=9.0)


def test_a_first_size_that_does_not_fit_is_made_smaller():
    case = layers()

    result = case.find("2 MiB", init_val=8192, max_val=16384, max_overhead=9.0)

    assert 1 < int(result) < 8192
    assert result.trial.measured_peak_bytes <= result.budget_bytes


@network(lambda: {"net": nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)), "calls": 0.0})
def changes(self, x: torch.Tensor) -> torch.Tensor:
    """A model that is another graph each time it is called."""
    self.calls += 1.0
    return self.net(x) * self.calls


def test_where_no_size_is_proven_the_largest_that_ran_is_given():
    case = case_of(changes(), lambda n: torch.randn(n, 32))

    result = case.find("4 MiB", max_overhead=9.0)

    assert case.steps == result.real_steps <= MAX_STEPS
    assert result.trial.measured_peak_bytes is None
    assert result.trial.predicted_peak_bytes <= result.budget_bytes
    assert result.limited_by == "the number of real steps"


@pytest.mark.slow
def test_two_processes_get_the_size_of_the_smaller_budget(tmp_path):
    (first, *_), (second, *_) = ranks = run_two("tests.two_sizes", tmp_path, timeout=240)

    assert first.size == second.size
    assert (first.budget_bytes, second.budget_bytes) == (2 * MiB, 2 * MiB)
    assert first.trial.measured_peak_bytes <= 2 * MiB
    assert ranks[0][1] == ranks[1][1]  # each step was of one size on both
    for mine, theirs in zip(ranks[0][2].values(), ranks[1][2].values(), strict=True):
        assert torch.equal(mine, theirs)
