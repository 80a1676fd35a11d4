"""Each plan is told once, and a budget does not change without a word."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from hiremate_lightning import hiremate
from hiremate_lightning.messages import Announcements, PlanReports
from hiremate_lightning.planning.plan import Plan
from hiremate_lightning.reporting.report import Reporter
from hiremate_lightning.signatures.step_signature import StepSignature
from tests.behaviour.reports.test_report import blocks_plan
from tests.exact import take_steps

STATE = ("optimizer state", 2**18)


@pytest.fixture
def signature() -> StepSignature:
    return StepSignature((0,))


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)


@pytest.fixture
def reports(console: Console) -> PlanReports:
    return PlanReports(Reporter(console=console), Announcements("net"))


def said(console: Console) -> list[str]:
    lines = console.file.getvalue().splitlines()
    console.file.truncate(0)
    console.file.seek(0)
    return [line for line in lines if ", more: " not in line]


def measured(plan: Plan, peak_bytes: int) -> Plan:
    return plan.with_measured(peak_bytes=peak_bytes, step_ms=10.0, recompute_ms=1.0)


def test_a_measurement_is_said_once(reports: PlanReports, console: Console, signature: StepSignature):
    plan = blocks_plan(2)
    for peak_bytes in (1000, 1001):
        reports.measured(signature, measured(plan, peak_bytes))
    assert len(said(console)) == 1


def test_a_measurement_above_the_budget_is_said_again(reports: PlanReports, console: Console, signature: StepSignature):
    plan = blocks_plan(2)
    for peak_bytes in (1000, plan.budget_bytes + 1, plan.budget_bytes + 2):
        reports.measured(signature, measured(plan, peak_bytes))
    assert [("OVER the budget" in line) for line in said(console)] == [False, True]


def test_a_new_plan_is_measured_anew(reports: PlanReports, console: Console, signature: StepSignature):
    for plan in (blocks_plan(2), blocks_plan(4)):
        reports.measured(signature, measured(plan, 1000))
    assert len(said(console)) == 2


def test_a_budget_that_changes_comes_with_its_reason(reports: PlanReports, console: Console, signature: StepSignature):
    plan = blocks_plan(2)
    reports.planned(signature, plan)
    said(console)
    more = plan.changed(budget_bytes=plan.budget_bytes + STATE[1], resident_parts=(*plan.resident_parts, STATE))
    for _ in range(2):
        reports.kept(signature, more)
    (line,) = said(console)
    assert line.startswith("HiRemate plan of GPT: budget ")
    assert line.endswith(", since 256 KiB of optimizer state came, and a share is of what a step adds to that")


def test_a_smaller_budget_names_what_is_gone(reports: PlanReports, console: Console, signature: StepSignature):
    """A new optimizer has no state yet, though a resized weight is a little larger."""
    plan = blocks_plan(2)
    weights = ("weights", 2048)
    reports.planned(signature, plan.changed(budget_bytes=plan.budget_bytes + STATE[1], resident_parts=(STATE,)))
    said(console)
    reports.kept(signature, plan.changed(resident_parts=(weights,)))
    (line,) = said(console)
    assert line.endswith(", since 256 KiB of optimizer state is gone, and a share is of what a step adds to the rest")


def test_no_line_names_a_budget_that_reads_the_same(reports: PlanReports, console: Console, signature: StepSignature):
    plan = blocks_plan(2)
    for budget_bytes in (10_590_000, 10_630_000):
        reports.kept(signature, plan.changed(budget_bytes=budget_bytes))
    assert said(console) == []


def test_no_line_names_batches_that_come_and_go(reports: PlanReports, console: Console, signature: StepSignature):
    """The last batch of each epoch is smaller: the budget is another one for a step."""
    plan = blocks_plan(2)
    for size_bytes in (2**16, 2**15, 2**16):
        budget_bytes = plan.budget_bytes + size_bytes
        reports.kept(signature, plan.changed(budget_bytes=budget_bytes, resident_parts=(STATE, ("batch", size_bytes))))
    assert said(console) == []


def test_no_line_names_a_budget_that_is_smaller_for_a_while(
    reports: PlanReports, console: Console, signature: StepSignature
):
    """A validation frees the gradients of the step before, so that the step after it adds less."""
    plan = blocks_plan(2)
    for more_bytes in (2**16, 0, 2**16):
        reports.kept(signature, plan.changed(budget_bytes=plan.budget_bytes + more_bytes, resident_parts=(STATE,)))
    assert said(console) == []


def test_a_plan_that_is_made_again_comes_with_its_reason(
    reports: PlanReports, console: Console, signature: StepSignature
):
    plan = blocks_plan(2)
    reports.planned(signature, plan)
    reports.planned(signature, plan.changed(resident_parts=(*plan.resident_parts, STATE)))
    assert said(console)[1] == "HiRemate plan of GPT is made again, since 256 KiB of optimizer state came"


def test_another_budget_that_was_asked_for_needs_no_reason(capsys: pytest.CaptureFixture[str]):
    model = hiremate(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), "100%")
    take_steps(model, lambda _: torch.randn(64, 8), 2, clears="never")
    hiremate(model, "1 GiB")
    assert "since" not in capsys.readouterr().err


def test_a_share_that_grows_by_the_optimizers_state_says_so(capsys: pytest.CaptureFixture[str]):
    """The optimizer steps for the first time after the plan was made, as where gradients are accumulated."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    hiremate(model, "60%")
    for index in range(6):
        model(torch.randn(512, 64)).square().mean().backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    said = re.findall(r"budget \S+ MiB -> \S+ MiB, since 260 KiB of optimizer state came", capsys.readouterr().err)
    assert len(said) == 1


def test_ten_steps_say_three_lines(capsys: pytest.CaptureFixture[str]):
    """The peak is measured again now and then, and differs by some bytes: that is no news."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    hiremate(model, "60%")
    take_steps(model, lambda _: torch.randn(512, 64), 10, optimizer=optimizer)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("HiRemate plan")]
    assert [line.split(" ")[3] for line in lines] == ["Sequential:", "Sequential,", "Sequential,"]


def test_the_advice_runs_as_it_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Both what shows the table and what writes the page; for torch.compile see `test_compile_backend`."""
    monkeypatch.chdir(tmp_path)

    def train(full: str = "") -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        exec(f"hiremate(model, '100%', {full})", {"hiremate": hiremate, "model": model})
        take_steps(model, lambda _: torch.randn(64, 8), 5)
        return model

    model = train()
    said = re.search(r"more: (.*) shows a table; (.*) writes a page", capsys.readouterr().err)
    assert said is not None
    exec(said[2], {"model": model})
    assert (tmp_path / "plan.html").stat().st_size
    train(said[1])
    assert "| module " in capsys.readouterr().err
