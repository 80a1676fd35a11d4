"""Accelerate: what is prepared with a budget trains, saves and unwraps as what is prepared without."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import GeneralTracker
from accelerate.utils import DistributedType, find_executable_batch_size
from torch import nn

from hiremate_lightning import BudgetError, ConfigurationError, InfeasibleBudgetError, get_plan, remove_hiremate
from hiremate_lightning.integrations.accelerate import ENVIRONMENT_BUDGET, prepare_hiremate
from tests.exact import take_steps
from tests.loops import ROWS, WIDTH, make_batch
from tests.loops import make_model as make


@pytest.fixture(autouse=True)
def _no_budget_of_the_environment(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_BUDGET, raising=False)


def prepared(accelerator: Accelerator, **options) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return prepare_hiremate(accelerator, model, optimizer, **{"budget": "70%", "verbose": False, **options})


def train(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for index in range(steps):
        accelerator.backward(model(make_batch(index)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def test_a_state_is_saved_and_loaded(tmp_path):
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepared(accelerator)
    train(accelerator, model, optimizer)
    weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.save_state(str(tmp_path))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()

    accelerator.load_state(str(tmp_path))

    found = accelerator.get_state_dict(model)
    assert list(found) == list(weights) == list(make().state_dict())
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_what_is_unwrapped_is_the_model_that_was_prepared():
    accelerator, model = Accelerator(cpu=True, mixed_precision="bf16"), make()
    prepared_model = prepare_hiremate(accelerator, model, budget="70%", verbose=False)

    unwrapped = accelerator.unwrap_model(prepared_model)

    assert unwrapped is model
    assert [type(m) for m in unwrapped.modules()] == [type(m) for m in make().modules()]
    remove_hiremate(unwrapped)
    assert all(m._compiled_call_impl is None for m in model.modules())


def test_the_environment_gives_the_budget(monkeypatch):
    """Without trackers nothing is logged."""

    class NeverLogging(Accelerator):
        def log(self, *_):
            pytest.fail("there is no tracker")

    monkeypatch.setenv(ENVIRONMENT_BUDGET, "75%")
    accelerator = NeverLogging(cpu=True)
    model, optimizer = prepared(accelerator, budget=None)
    train(accelerator, model, optimizer, steps=2)
    assert str(get_plan(model).budget) == "75%"

    monkeypatch.setenv(ENVIRONMENT_BUDGET, "10 bananas")
    model = make()
    with pytest.raises(BudgetError, match=ENVIRONMENT_BUDGET):
        prepare_hiremate(Accelerator(cpu=True), model)
    assert model._compiled_call_impl is None


class Tracker(GeneralTracker):
    """Keeps what it is given."""

    name = "test"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.logged: list[dict[str, float]] = []
        self.steps: list[int | None] = []

    @property
    def tracker(self):
        return self

    def store_init_configuration(self, values):
        pass

    def log(self, values, step=None):
        self.logged.append(values)
        self.steps.append(step)


def test_trackers_get_each_plan_and_what_was_measured_of_it():
    """With the number of optimizer steps."""
    tracker = Tracker()
    accelerator = Accelerator(cpu=True, log_with=tracker, gradient_accumulation_steps=4)
    model, optimizer = prepared(accelerator)
    accelerator.init_trackers("test")

    expected = []
    for index in range(9):
        with accelerator.accumulate(model):
            train(accelerator, model, optimizer, steps=1)
        expected += [index // 4] * (len(tracker.steps) - len(expected))

    plan, first, last = get_plan(model), tracker.logged[0], tracker.logged[-1]
    assert "hiremate/measured_peak_bytes" not in first
    assert last["hiremate/measured_peak_bytes"] == plan.measured.peak_bytes
    assert last["hiremate/planned_peak_bytes"] == plan.planned_peak_bytes
    assert last["hiremate/measured_overhead"] == plan.measured.overhead
    assert tracker.steps == expected
    assert len(set(expected)) > 1


def test_a_batch_size_that_does_not_fit_is_backed_off_from():
    accelerator = Accelerator(cpu=True)
    tried = []

    @find_executable_batch_size(starting_batch_size=8 * ROWS)
    def run(batch_size):
        tried.append(batch_size)
        model = prepare_hiremate(accelerator, make(), budget="6 MB", time_limit_s=0.5, verbose=False)
        take_steps(model, lambda _: torch.randn(batch_size, WIDTH), 2, clears="never")
        assert get_plan(model).planned_peak_bytes <= 6_000_000
        return batch_size

    found = run()

    assert tried[0] == 8 * ROWS
    assert found == tried[-1] < tried[0]


def test_an_infeasible_budget_is_an_error_naming_one_that_works():
    accelerator = Accelerator(cpu=True)

    def train(budget: int | str) -> None:
        made = make()
        options = {"budget": budget, "time_limit_s": 0.5, "verbose": False}
        model, optimizer = prepare_hiremate(accelerator, made, torch.optim.AdamW(made.parameters()), **options)
        take_steps(model, lambda _: torch.randn(ROWS, WIDTH), 4, optimizer=optimizer, clears="end")

    with pytest.raises(InfeasibleBudgetError, match="smallest budget found") as caught:
        train("100 kB")
    train(f"{caught.value.smallest_bytes} B")


def fake(kind: DistributedType) -> SimpleNamespace:
    return SimpleNamespace(distributed_type=kind, is_main_process=True)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (DistributedType.FSDP, "FSDP1 flattens the parameters of each unit. Set fsdp_version: 2"),
        (DistributedType.DEEPSPEED, "DeepSpeed lays all weights into one flat tensor"),
        (DistributedType.MEGATRON_LM, "Megatron-LM splits and recomputes layers itself"),
        (DistributedType.XLA, "XLA decides on memory itself"),
        (DistributedType.MULTI_NPU, ""),
    ],
)
def test_what_cannot_work_is_refused_by_name(kind, reason):
    model = make()
    with pytest.raises(ConfigurationError, match=f"{kind.value}.*{reason}"):
        prepare_hiremate(fake(kind), model, budget="70%")
    assert model._compiled_call_impl is None


def test_what_accelerate_compiles_runs_by_its_plan(capsys):
    """The numbers are those of uncompiled code; what was compiled comes back when the plan goes."""
    plain = make()
    train(Accelerator(cpu=True), plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, dynamo_backend="eager")
    compiled, optimizer = prepared(accelerator, verbose=True)
    model = accelerator.unwrap_model(compiled, keep_torch_compile=False)

    train(accelerator, compiled, optimizer)

    AcceleratorState._reset_state(reset_partial_state=True)
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    plan = get_plan(model)
    assert plan is not None
    assert plan.measured.peak_bytes is not None
    assert "in place of torch.compile" in capsys.readouterr().err
    assert compiled.forward == model.__call__
    remove_hiremate(model)
    assert compiled.forward != model.__call__


def test_not_exactly_one_module_after_the_accelerator_is_refused():
    with pytest.raises(ConfigurationError, match="prepare_hiremate plans one module, found 2"):
        prepare_hiremate(Accelerator(cpu=True), make(), make(), budget="70%")
    with pytest.raises(ConfigurationError, match=r"The accelerator comes first: .*, found a Sequential"):
        prepare_hiremate(nn.Sequential(), Accelerator(cpu=True), budget="70%")  # type: ignore[arg-type]


def test_an_accelerator_that_can_t_prepare_leaves_the_model():
    class Failing(Accelerator):
        def prepare(self, *_):
            raise RuntimeError("no")

    accelerator, model = Failing(cpu=True), make()
    with pytest.raises(RuntimeError, match="no"):
        prepare_hiremate(accelerator, model, budget="70%")
    assert model._compiled_call_impl is None
