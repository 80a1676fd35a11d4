"""Each plan is reported once, and no budget changes without a message."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from hiremate_lightning import hiremate
from hiremate_lightning.planning.plan import Plan
from hiremate_lightning.reporting.report import Reporter
from hiremate_lightning.sessions.messages import Messages, PlanReports
from hiremate_lightning.signatures.step_signature import StepSignature
from tests.exact import take_steps
from tests.tiny import blocks_plan

STATE = ("optimizer state", 2**18)


class Reports:
    """Reports of one step signature, and their lines since the last look."""

    def __init__(self) -> None:
        self.console, self.signature = Console(file=io.StringIO(), width=200), StepSignature((0,))
        self.reports = PlanReports(Reporter(console=self.console), Messages("net"), listeners=[])

    def planned(self, *plans: Plan) -> list[str]:
        for plan in plans:
            self.signature.plan = plan
            self.reports.planned(self.signature, plan)
        return self.new_lines()

    def kept(self, *plans: Plan) -> list[str]:
        for plan in plans:
            self.signature.plan = plan
            self.reports.kept(self.signature, plan)
        return self.new_lines()

    def measured(self, *pairs: tuple[Plan, int]) -> list[str]:
        for plan, peak_bytes in pairs:
            measured = plan.with_measured(peak_bytes=peak_bytes, step_ms=10.0, recompute_ms=1.0)
            self.reports.measured(self.signature, measured)
        return self.new_lines()

    def new_lines(self) -> list[str]:
        lines = self.console.file.getvalue().splitlines()
        self.console.file.truncate(0)
        self.console.file.seek(0)
        return [line for line in lines if ", more: " not in line]


def test_a_measurement_is_reported_once():
    """A peak above the budget is reported again, and so is the peak of a new plan."""
    plan = blocks_plan(2)
    over = plan.budget_bytes + 1
    lines = Reports().measured((plan, 1000), (plan, 1001), (plan, over), (plan, over + 1))
    assert ["OVER the budget" in line for line in lines] == [False, True]
    assert len(Reports().measured((plan, 1000), (blocks_plan(4), 1000))) == 2


def test_a_budget_that_changes_comes_with_its_reason():
    """Also where it is smaller: a new optimizer has no state yet, though a resized weight is a little larger."""
    plan, reports = blocks_plan(2), Reports()
    reports.planned(plan)
    more = replace(plan, budget_bytes=plan.budget_bytes + STATE[1], resident_parts=(*plan.resident_parts, STATE))
    (line,) = reports.kept(more, more)
    assert line.startswith("HiRemate plan of GPT: budget ")
    assert line.endswith(", since 256 KiB of optimizer state came, and a share is of what a step adds to that")

    reports = Reports()
    reports.planned(replace(plan, budget_bytes=plan.budget_bytes + STATE[1], resident_parts=(STATE,)))
    (line,) = reports.kept(replace(plan, resident_parts=(("weights", 2048),)))
    assert line.endswith(", since 256 KiB of optimizer state is gone, and a share is of what a step adds to the rest")


PLAN = blocks_plan(2)
UNSAID = {
    "reads the same": [{"budget_bytes": size_bytes} for size_bytes in (10_590_000, 10_630_000)],
    "batches come and go": [  # the last one of each epoch is smaller
        {"budget_bytes": PLAN.budget_bytes + size_bytes, "resident_parts": (STATE, ("batch", size_bytes))}
        for size_bytes in (2**16, 2**15, 2**16)
    ],
    "smaller for a while": [  # a validation frees the gradients of the step before
        {"budget_bytes": PLAN.budget_bytes + more_bytes, "resident_parts": (STATE,)} for more_bytes in (2**16, 0, 2**16)
    ],
}


@pytest.mark.parametrize("changes", UNSAID.values(), ids=UNSAID)
def test_no_line_names_a_budget_that_stays_or_comes_back(changes: list[dict[str, object]]):
    assert Reports().kept(*(replace(PLAN, **change) for change in changes)) == []


def test_a_plan_that_is_made_again_comes_with_its_reason():
    plan = blocks_plan(2)
    lines = Reports().planned(plan, replace(plan, resident_parts=(*plan.resident_parts, STATE)))
    assert lines[1] == "HiRemate plan of GPT is made again, since 256 KiB of optimizer state came"


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
    lines = re.findall(r"budget \S+ MiB -> \S+ MiB, since 260 KiB of optimizer state came", capsys.readouterr().err)
    assert len(lines) == 1


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
    found = re.search(r"more: (.*) shows a table; (.*) writes a page", capsys.readouterr().err)
    assert found is not None
    exec(found[2], {"model": model})
    assert (tmp_path / "plan.html").stat().st_size
    train(found[1])
    assert "| module " in capsys.readouterr().err
