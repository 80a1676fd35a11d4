"""A budget that an error names is given back, as bytes and as the text says it: training then stays inside it.

Each model has code outside of its captured parts, or a loop that shows only later what a step needs.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hiremate_lightning import HiRemateWarning, InfeasibleBudgetError, get_plan, hiremate
from hiremate_lightning.callbacks import HiRemateCallback
from hiremate_lightning.integrations.accelerate import prepare_hiremate
from hiremate_lightning.planning import solutions
from hiremate_lightning.planning.plan import Plan
from hiremate_lightning.planning.solvers.base import Problem, Solution
from hiremate_lightning.planning.solvers.worker import Worker
from hiremate_lightning.records.step import Decisions
from hiremate_lightning.targets.modules import targets_of
from hiremate_lightning.testing import changed_thresholds
from hiremate_lightning.units import parse_budget
from tests.exact import network
from tests.trainers import Squared, quiet_trainer

WIDTH, ROWS, STEPS = 32, 2048, 6
TOO_SMALL = "256 KiB"

Budget = int | str
Train = Callable[[Budget], Iterable[Plan]]
Loss = Callable[[nn.Module, Tensor], Tensor]


def batch(index: int, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(index))


def layers(depth: int = 3, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    block = [nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.1)] if norm else [nn.GELU()]
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(WIDTH, WIDTH), *block)))


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x).square().mean()


@dataclass(frozen=True)
class Loop:
    """A training loop in plain PyTorch.

    Attributes:
        make: Builds the model.
        loss: Code outside of the captured part, in part.
        optimizer: Its class.
        accumulate: Backwards for each step of the optimizer.
        zero: Where gradients are freed: "begin", "middle" or "end" of a step; "fill" to set them to zero at its end.
        trained: Steps that have run before the model is planned.
        rows: Of the batches, in turn.
        time_limit_s: For solving one plan.
    """

    make: Callable[[], nn.Module] = layers
    loss: Loss = squares
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    accumulate: int = 1
    zero: str = "end"
    trained: int = 0
    rows: tuple[int, ...] = (ROWS,)
    time_limit_s: float = 30.0

    def __call__(self, budget: Budget) -> Iterable[Plan]:
        model = self.make()
        optimizer = self.optimizer(model.parameters(), lr=1e-3)

        def step(index: int) -> None:
            if self.zero == "begin":
                optimizer.zero_grad()
            loss = self.loss(model, batch(index, self.rows[index % len(self.rows)]))
            if self.zero == "middle":
                optimizer.zero_grad()
            loss.backward()
            if (index + 1) % self.accumulate == 0:
                optimizer.step()
                if self.zero in ("end", "fill"):
                    optimizer.zero_grad(set_to_none=self.zero == "end")

        for index in range(self.trained):
            step(index)
        hiremate(model, budget, optimizer=optimizer, time_limit_s=self.time_limit_s, verbose=False)
        for index in range(STEPS + 2 * self.accumulate):
            step(index)
        return plans_of(model)


def plans_of(model: nn.Module) -> Iterable[Plan]:
    targets = targets_of(model)
    assert targets is not None
    return targets.session.plans.values()


@network(lambda: {"one": layers(2), "other": layers(2)})
def broken(self, x: Tensor) -> Tensor:
    """Two captured graphs, with code between them."""
    y = self.one(x)
    torch._dynamo.graph_break()
    return self.other(y.exp().log1p())


class Rivals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = layers(2, norm=True), nn.Sequential(layers(2), nn.Linear(WIDTH, 1))


def train_rivals(budget: Budget) -> Iterable[Plan]:
    """Train a GAN: two kinds of steps, each with its optimizer."""
    model = Rivals()
    makers, judges = (torch.optim.Adam(part.parameters()) for part in (model.maker, model.judge))
    hiremate(model, budget, verbose=False)
    for index in range(STEPS):
        judges.zero_grad()
        made = model.maker(batch(index + 100)).detach()
        (F.softplus(model.judge(made)).mean() + F.softplus(-model.judge(batch(index))).mean()).backward()
        judges.step()
        makers.zero_grad()
        F.softplus(-model.judge(model.maker(batch(index + 200)))).mean().backward()
        makers.step()
    return plans_of(model)


def train_by_closure(budget: Budget) -> Iterable[Plan]:
    """Train by L-BFGS, which runs several steps in one and whose state grows for a while."""
    model, x = layers(), batch(0)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2, history_size=2)
    hiremate(model, budget, optimizer=optimizer, verbose=False)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = squares(model, x)
        loss.backward()
        return loss

    for _ in range(6):
        optimizer.step(closure)
    return plans_of(model)


class Module(Squared):
    """The model of the README, small."""

    def training_step(self, x: Tensor, index: int) -> Tensor:
        return squares(self, x)


def train_by_lightning(budget: Budget, **options: object) -> Iterable[Plan]:
    callback = HiRemateCallback(budget, verbose=False, target=options.pop("target", None))
    quiet_trainer(callback, **options).fit(Module(layers()), DataLoader(torch.randn(STEPS * 1024, WIDTH), 1024))
    assert callback.plan is not None
    return [callback.plan]


def train_by_accelerate(budget: Budget) -> Iterable[Plan]:
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    planned, optimizer = prepare_hiremate(accelerator, model, optimizer, budget=budget, verbose=False)
    for index in range(STEPS):
        with accelerator.accumulate(planned):
            accelerator.backward(squares(planned, batch(index)))
            optimizer.step()
            optimizer.zero_grad()
    return plans_of(model)


def train_compiled(budget: Budget) -> Iterable[Plan]:

    torch.compiler.reset()
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    call = torch.compile(model, backend="hiremate", options={"budget": budget, "verbose": False})
    for index in range(STEPS):
        squares(call, batch(index)).backward()
        optimizer.step()
        optimizer.zero_grad()
    plan = get_plan(model)
    assert plan is not None
    return [plan]


def change_budget(budget: Budget) -> Iterable[Plan]:
    """Change the budget of a model that is planned for two sizes."""
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    hiremate(model, "1 GiB", optimizer=optimizer, verbose=False)
    for index in range(STEPS):
        squares(model, batch(index, ROWS // 2 if index < STEPS - 2 else ROWS)).backward()
        optimizer.step()
        optimizer.zero_grad()
    hiremate(model, budget)
    return plans_of(model)


def own_two_views(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - model(x + 1).detach() + model(-x)).square().mean()


def through_frozen_layers(model: nn.Module, x: Tensor) -> Tensor:
    weight = torch.ones(4 * WIDTH, WIDTH) / WIDTH
    return (F.linear(model(x), weight).relu() - F.linear(x, weight)).square().mean()


def with_penalty(model: nn.Module, x: Tensor) -> Tensor:
    return squares(model, x) + sum(p.square().sum() for p in model.parameters()) * 1e-4


def classes(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x), torch.arange(len(x)) % 256)


_kept: list[Tensor] = []


def keeping_outputs(model: nn.Module, x: Tensor) -> Tensor:
    _kept[:] = [model(x)]
    return (_kept[0] - x).square().mean()


TRAININGS: dict[str, Train] = {
    "loss outside": Loop(),
    "no optimizer state": Loop(optimizer=torch.optim.SGD),
    "optimizer state from the start": Loop(trained=2),
    "gradients accumulated": Loop(accumulate=3),
    "gradients freed after the forward": Loop(zero="middle"),
    "gradients filled with zeros": Loop(zero="fill"),
    "batch norm and dropout": Loop(make=lambda: layers(norm=True), zero="begin"),
    "two graphs": Loop(make=broken),
    "three views": Loop(loss=own_two_views),
    "a network as loss": Loop(loss=through_frozen_layers),
    "a penalty on weights": Loop(loss=with_penalty),
    "many classes": Loop(make=lambda: nn.Sequential(layers(2), nn.Linear(WIDTH, 256)), loss=classes),
    "outputs kept": Loop(loss=keeping_outputs),
    "the largest batch first": Loop(rows=(ROWS, ROWS // 2)),
    "a GAN": train_rivals,
    "L-BFGS": train_by_closure,
    "Lightning": train_by_lightning,
    "Lightning, accumulating": lambda budget: train_by_lightning(budget, accumulate_grad_batches=2),
    "Lightning, the whole step": lambda budget: train_by_lightning(budget, target="training_step"),
    "Accelerate": train_by_accelerate,
    "torch.compile": train_compiled,
    "another budget": change_budget,
}


def quietly(train: Train, budget: Budget) -> list[Plan]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(train(budget))


def named_by(train: Train, budget: Budget) -> InfeasibleBudgetError:
    with pytest.raises(InfeasibleBudgetError) as caught:
        quietly(train, budget)
    assert "smallest budget found" in str(caught.value), "it says that nothing less was found, not `at least`"
    return caught.value


def assert_trains_inside(train: Train, budget: Budget) -> None:
    plans = quietly(train, budget)
    size_bytes = parse_budget(budget).size_bytes
    assert plans
    for plan in plans:
        assert plan.planned_peak_bytes <= plan.budget_bytes
        assert (plan.measured.peak_bytes or 0) <= plan.budget_bytes
        assert size_bytes in (None, plan.budget_bytes)


@pytest.mark.parametrize("name", TRAININGS)
def test_a_named_budget_trains_when_it_is_given_back(name: str) -> None:
    error = named_by(TRAININGS[name], TOO_SMALL)

    named = re.search(r"smallest budget found[a-z ]* is ([\d.]+ [KM]iB) \(([\d,]+) bytes", str(error))

    assert named is not None
    assert int(named[2].replace(",", "")) == error.smallest_bytes
    assert error.smallest_bytes <= parse_budget(named[1]).size_bytes < 1.01 * error.smallest_bytes
    assert_trains_inside(TRAININGS[name], f"{error.smallest_bytes} B")


STARVED_S = 0.2  # the time limit of trainings whose worker is starved
DEEP = {"make": lambda: layers(8), "time_limit_s": STARVED_S}
STARVED: dict[str, Loop] = {
    "loss outside": Loop(**DEEP),
    "gradients accumulated": Loop(**DEEP, accumulate=2),
    "batch norm and dropout": Loop(make=lambda: layers(5, norm=True), zero="begin", time_limit_s=STARVED_S),
    "a network as loss": Loop(**DEEP, loss=through_frozen_layers),
    "two graphs": Loop(make=broken, time_limit_s=STARVED_S),
}


RUNS_S, RESTS_S = 0.01, 0.04  # in turns, while a starved worker solves


@pytest.fixture
def starved(monkeypatch: pytest.MonkeyPatch, set_clock: Callable[[float], None]) -> list[str]:
    """Stop the solving process four fifths of the time; return the names of its solves.

    Where this process looks at the clock to end a search, time runs fast: each look is a hundredth of a second later.
    """
    solves, solve = list[str](), Worker.solve

    def starve(worker: Worker, problem: Problem, name: str, limit_s: float) -> Solution:
        process, is_done = worker._process.pid, threading.Event()

        def stop_and_go() -> None:
            while not is_done.wait(RUNS_S):
                os.kill(process, signal.SIGSTOP)
                is_done.wait(RESTS_S)
                os.kill(process, signal.SIGCONT)

        thread = threading.Thread(target=stop_and_go)
        thread.start()
        try:
            solves.append(name)
            return solve(worker, problem, name, limit_s)
        finally:
            is_done.set()
            thread.join()

    monkeypatch.setattr(Worker, "solve", starve)
    set_clock(0.01)
    return solves


@pytest.mark.parametrize("name", STARVED)
def test_a_named_budget_trains_with_a_starved_worker(name: str, starved: list[str]) -> None:
    error = named_by(STARVED[name], TOO_SMALL)
    assert starved
    solutions.forget()  # as in another process

    starved.clear()
    assert_trains_inside(STARVED[name], f"{error.smallest_bytes} B")

    assert starved


@pytest.fixture
def equal_costs() -> Iterator[None]:
    """Let each operation cost what it always does: measured times differ from run to run."""
    with changed_thresholds(measures_times=False):
        yield


@pytest.fixture
def decided_unstarved(equal_costs: None) -> tuple[int, list[Decisions]]:
    """A budget, and what is recomputed within it, on a worker that has what it needs."""
    train = STARVED["loss outside"]
    plain = quietly(train, "1 GiB")[0]
    budget = plain.resident_bytes + plain.unplanned.peak_bytes * 6 // 10
    decided = [plan.solution.recompute for plan in quietly(train, budget)]
    solutions.forget()
    return budget, decided


def test_a_starved_worker_makes_the_same_plan(
    decided_unstarved: tuple[int, list[Decisions]], starved: list[str]
) -> None:
    budget, decided = decided_unstarved
    assert [plan.solution.recompute for plan in quietly(STARVED["loss outside"], budget)] == decided
    assert starved


SHARED = ("loss outside", "gradients accumulated", "Lightning")


@pytest.mark.parametrize("name", SHARED)
def test_a_named_share_trains_when_it_is_given_back(name: str) -> None:
    error = named_by(TRAININGS[name], "2%")

    named = re.search(r"bytes, ([\d.]+%) of what", str(error))

    assert named is not None
    assert_trains_inside(TRAININGS[name], named[1])


def test_without_an_optimizer_no_budget_is_named_as_enough() -> None:
    model = hiremate(layers(), TOO_SMALL, verbose=False)
    squares(model, batch(0)).backward()

    with pytest.raises(InfeasibleBudgetError, match="It needs at least"):
        model(batch(1))


def test_a_hopeless_budget_stops_training_after_a_few_steps() -> None:
    """An optimizer is known, and never steps."""
    model, steps = layers(), []
    optimizer = torch.optim.AdamW(model.parameters())
    hiremate(model, TOO_SMALL, optimizer=optimizer, verbose=False)

    def train() -> None:
        for index in range(20):
            squares(model, batch(index)).backward()
            steps.append(index)

    with (
        pytest.warns(HiRemateWarning, match="is too small. Up to .* steps run at the least memory"),
        pytest.raises(InfeasibleBudgetError, match="It needs at least"),
    ):
        train()

    assert 2 < len(steps) < 12
