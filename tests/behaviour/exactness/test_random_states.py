"""Imports, plans, reports and callbacks leave the random generators of Python, NumPy and torch as they were.

All runs in new processes: rich draws when it is first imported, and prints otherwise where there is no terminal.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import run_python

SCRIPT = """
import io
import random
import sys
from contextlib import contextmanager

import numpy as np
import torch

def states():
    return {"random": random.getstate(), "numpy": repr(np.random.get_state()), "torch": torch.get_rng_state().tolist()}

@contextmanager
def watched(name):
    before = states()
    yield
    after = states()
    moved = [generator for generator in before if after[generator] != before[generator]]
    print(f"WATCHED {name}: {', '.join(moved) or 'as they were'}")
"""
DRAW = "a draw of each generator"
IMPORTS = """
for name in ("", ".api", ".callbacks", ".integrations.accelerate", ".integrations.compile_backend",
             ".integrations.lightning_strategy", ".command_line.cli", ".command_line.commands",
             ".reporting.html_report", ".reporting.svg_report", ".sizes.batch_size", ".planning.solvers.worker"):
    with watched("import of hiremate_lightning" + name):
        __import__("hiremate_lightning" + name)
with watched("a draw of each generator"):
    random.random(), np.random.rand(), torch.rand(1)
"""
WORK = """
import lightning.pytorch as pl
import rich
from pathlib import Path
from torch import nn
from hiremate_lightning import find_max_batch_size, get_plan, hiremate, write_html, write_svg
from hiremate_lightning.callbacks import HiRemateBatchSizeFinder, HiRemateCallback, MemoryMonitor
from hiremate_lightning.command_line.cli import main

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6)))

    def forward(self, x):
        return self.net(x)

    def training_step(self, x, batch_idx):
        return self(x).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(rows, batch_size=getattr(self, "batch_size", 512), shuffle=False,
                                           generator=torch.Generator())

    batch_size = 512

shown = io.StringIO()
rich.reconfigure(file=shown, force_terminal=True, force_interactive=True, width=100)
rows = torch.ones(2048, 32)
net = Net()
with watched("three planned steps, with the table"):
    hiremate(net, "60%", verbose="full", time_limit_s=1)
    for _ in range(4):
        net(rows).square().mean().backward()
assert "\\x1b[" in shown.getvalue() and "solver" in shown.getvalue(), shown.getvalue()
with watched("pages and pictures"):
    write_html(get_plan(net), "plan.html")
    write_svg(get_plan(net), "plan.svg")

quiet = dict(max_epochs=1, logger=False, enable_checkpointing=False, enable_model_summary=False, accelerator="cpu")
net = Net()
options = dict(budget="20 MiB", time_limit_s=1)
callbacks = [HiRemateBatchSizeFinder(**options), HiRemateCallback(**options), MemoryMonitor()]
with watched("a fit with all callbacks"):
    pl.Trainer(callbacks=callbacks, **quiet).fit(net)

lines = "from torch import nn", "def net(): return nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))"
Path("models.py").write_text("\\n".join(lines))
with watched("the command's plan"):
    assert main(["plan", "models.py:net", "--input", "256x32", "--budget", "90%"]) == 0
"""


def watch(code: str, cwd: Path) -> dict[str, str]:
    """Run code in a new process; return for each part of it which generators it moved."""
    result = run_python("-c", SCRIPT + code, cwd=cwd, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = (line.removeprefix("WATCHED ") for line in result.stdout.splitlines() if line.startswith("WATCHED "))
    return dict(line.split(": ", 1) for line in lines)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each part of imports and work moved, in one process."""
    return watch(IMPORTS + WORK, tmp_path_factory.mktemp("random_states"))


@pytest.mark.slow
def test_the_generators_stay_as_they_were(found: dict[str, str]) -> None:
    draws = {name: moved for name, moved in found.items() if name == DRAW}

    assert {name: moved for name, moved in found.items() if name not in draws and moved != "as they were"} == {}
    assert draws == {DRAW: "random, numpy, torch"}, "a generator that is drawn from is seen to move"
    assert len(found) == 17
