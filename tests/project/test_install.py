"""Whether an installation works: its solver, its plans, and one model through each way to train.

`make test-latest` runs these with the newest release of all that the package needs, and what may differ with PyTorch's;
`make test-oldest` with the oldest.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from hiremate_lightning import get_plan, hiremate
from hiremate_lightning.callbacks import HiRemateBatchSizeFinder, HiRemateCallback, MemoryMonitor
from hiremate_lightning.integrations.accelerate import prepare_hiremate
from hiremate_lightning.planning.plan import Plan
from hiremate_lightning.planning.solvers.base import Problem, SolveOptions, Status
from hiremate_lightning.planning.solvers.mip_backend import BACKENDS, failure
from hiremate_lightning.planning.solvers.model import StepModel
from hiremate_lightning.planning.solvers.worker import apart, backend_failures
from tests.processes import run_python
from tests.tiny import transformer
from tests.trainers import quiet_trainer

pytestmark = pytest.mark.install
README = Path(__file__).resolve().parents[2] / "README.md"
STEPS = 4  # the first is captured, the second planned, the others run the plan
RECOMPUTE_MS = {70: 2.3, 50: 5.3}  # by per cent of the memory of keeping everything: what HiGHS 1.15.1 found
PLANS = """
import gc
from hiremate_lightning.planning.plan import Plan
solutions = {id(found.solution): found.solution for found in gc.get_objects() if isinstance(found, Plan)}
print("PLANS", len(solutions), "OPTIMAL", all(found.status.value == "optimal" for found in solutions.values()))
"""
TRAINING = """
import torch
from torch import nn
from hiremate_lightning import hiremate

model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
hiremate(model, "60%", verbose=False)
for _ in range(3):
    model(torch.ones(1024, 64)).square().mean().backward()
"""


# ---------------------------------------------------------------- the solver


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_solver_works(backend: str) -> None:
    assert failure(backend) == ""


def test_plans_are_solved_by_highs() -> None:
    assert backend_failures() == ()


def test_highs_is_the_library_that_the_package_asks_for() -> None:
    if importlib.util.find_spec("highsbox") is None or importlib.util.find_spec("highspy") is not None:
        pytest.skip("this environment is older than pyproject.toml: it has highspy, which python-mip prefers")
    assert failure("HIGHS") == ""

    import highsbox
    import mip.highs

    assert Path(mip.highs.libfile).is_relative_to(highsbox.highs_dist_dir())


@pytest.mark.parametrize("percent", RECOMPUTE_MS)
def test_a_plan_is_as_good_as_with_the_pinned_solver(percent: int) -> None:
    graph, profile = transformer()
    whole = Problem(graph, profile, 0)
    budget_bytes = StepModel(whole).keep_all_bytes * percent // 100
    solution = apart("portfolio")(replace(whole, budget_bytes=budget_bytes, options=SolveOptions(time_limit_s=20.0)))

    assert solution.status is Status.OPTIMAL
    assert solution.recompute_ms <= RECOMPUTE_MS[percent] + SolveOptions().gap * whole.step_ms


# ---------------------------------------------------------------- a solver that is not there


def run_without(folder: Path, code: str, *names: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process that finds none of the packages named."""
    for name in names:
        (folder / f"{name}.py").write_text(f"raise ImportError('No module named {name}')", encoding="utf-8")
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    return run_python("-c", code, timeout=300, PYTHONPATH=path)


def test_without_highs_cbc_plans_and_one_warning_names_the_cost(tmp_path: Path) -> None:
    result = run_without(tmp_path, TRAINING + PLANS, "highspy", "highsbox")

    assert result.returncode == 0, result.stderr
    assert "PLANS 1 OPTIMAL True" in result.stdout
    expected = (
        "HiRemateWarning: HiGHS does not work here (An error occurred while loading the HiGHS library: No module named "
        "highsbox), so CBC solves. Plans stay as good. Solving takes 1.3 times as long in the median, and up to 7 "
        "times as long. Mend it with: pip install --force-reinstall highsbox\n"
    )
    assert result.stderr.count(expected) == 1
    assert result.stderr.count("HiRemateWarning") == 1
    assert "Traceback" not in result.stderr


def test_without_a_solver_the_error_names_the_command(tmp_path: Path) -> None:
    result = run_without(tmp_path, TRAINING, "highspy", "highsbox", "cbcbox")

    last = result.stderr.splitlines()[-1]
    assert last.startswith("hiremate_lightning.errors.ConfigurationError: No MIP solver works here, and solver='port")
    assert last.endswith("Mend it with: pip install --force-reinstall highsbox")
    assert "No module named highsbox" in last
    assert "No module named cbcbox" in last
    assert "planned" not in result.stdout


# ---------------------------------------------------------------- one model through each way to train


class Net(pl.LightningModule):
    """Twelve equal layers: plain, or with the loss inside where a batch is a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(12)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return loss_of(self(x))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class WithLoss(nn.Module):
    """The same as transformers' Trainer takes it."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": loss_of(self.net(x))}


def loss_of(output: Tensor) -> Tensor:
    return (output - 1).square().mean()


def batches() -> list[Tensor]:
    return list(torch.randn(STEPS, 1024, 64, generator=torch.Generator().manual_seed(1)))


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def plain(net: Net) -> Net:
    """The same model, trained without a plan."""
    net = copy.deepcopy(net)
    train(net, net.configure_optimizers())
    return net


def train(model: nn.Module, optimizer: torch.optim.Optimizer, backward=Tensor.backward) -> None:
    for batch in batches():
        optimizer.zero_grad()
        backward(loss_of(model(batch)))
        optimizer.step()


def assert_planned(plan: Plan | None, net: Net, plain: Net) -> None:
    assert plan is not None
    assert plan.solution.status is Status.OPTIMAL
    assert plan.measured.peak_bytes is not None
    assert plan.measured.peak_bytes <= plan.budget_bytes < plan.unplanned_peak_bytes
    pairs = zip(net.state_dict().items(), plain.state_dict().items(), strict=True)
    assert [name for (name, one), (_, other) in pairs if not torch.equal(one, other)] == []


def test_plain_pytorch(net: Net, plain: Net) -> None:
    optimizer = net.configure_optimizers()
    hiremate(net, "60%", optimizer=optimizer)
    train(net, optimizer)

    assert_planned(get_plan(net), net, plain)


def test_lightning(net: Net, plain: Net) -> None:
    callback = HiRemateCallback("60%")
    quiet_trainer(callback).fit(net, torch.utils.data.DataLoader(batches(), batch_size=None))

    assert_planned(callback.plan, net, plain)


def test_the_batch_size_finder_of_lightning(net: Net) -> None:
    """Its arguments are those of Lightning's own finder, which has had all of them since 2.6."""
    finder = HiRemateBatchSizeFinder(budget="20 MiB", max_val=4096)
    net.batch_size = 2
    net.train_dataloader = lambda: torch.utils.data.DataLoader(torch.cat(batches()), batch_size=net.batch_size)
    callbacks = [finder, HiRemateCallback("20 MiB"), MemoryMonitor()]
    quiet_trainer(*callbacks, max_epochs=-1, max_steps=STEPS).fit(net)

    assert finder.result is not None
    assert net.batch_size == finder.result.size > 256


def test_accelerate(net: Net, plain: Net) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepare_hiremate(accelerator, net, net.configure_optimizers(), budget="60%")
    train(model, optimizer, accelerator.backward)

    assert_planned(get_plan(net), net, plain)


def test_a_backend_of_torch_compile(net: Net, plain: Net) -> None:
    torch._dynamo.reset()
    train(torch.compile(net, backend="hiremate", options={"budget": "60%"}), net.configure_optimizers())

    assert_planned(get_plan(net), net, plain)


def test_the_trainer_of_transformers(net: Net, plain: Net, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=STEPS, use_cpu=True, report_to=[], save_strategy="no", optim="sgd",
        learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=0.0,
    )  # fmt: skip
    rows = [{"x": batch} for batch in batches()]

    class InOrder(transformers.Trainer):
        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(rows, batch_size=None)

    hiremate(net, "60%")
    InOrder(WithLoss(net), arguments, train_dataset=rows).train()

    assert_planned(get_plan(net), net, plain)


# ---------------------------------------------------------------- what the README says


def test_the_first_snippet_of_the_readme_plans_with_a_proof(tmp_path: Path) -> None:
    snippet = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert snippet is not None

    result = run_python("-c", snippet[1] + PLANS, cwd=tmp_path, timeout=300)

    assert result.returncode == 0, result.stderr
    assert "PLANS 1 OPTIMAL True" in result.stdout
    assert "Traceback" not in result.stderr
