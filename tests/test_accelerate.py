"""Accelerate: what is prepared with a budget trains, saves and unwraps as what is prepared without."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, DynamoBackend, find_executable_batch_size
from torch import nn

from hiremate_lightning import BudgetError, ConfigurationError, InfeasibleBudgetError, get_plan
from hiremate_lightning.integrations.accelerate import ENVIRONMENT_BUDGET, prepare_hiremate

WIDTH, ROWS, STEPS = 32, 4096, 8


@pytest.fixture(autouse=True)
def _fresh_state(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_BUDGET, raising=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def make() -> nn.Module:
    torch.manual_seed(1)
    stages = (
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)
    )
    return nn.Sequential(*stages, nn.Linear(WIDTH, 1))


def train(accelerator: Accelerator, prepare, steps: int = STEPS):
    """Train a few steps; give the losses, the weights and the prepared model."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = prepare(model, optimizer)
    losses = []
    for index in range(steps):
        torch.manual_seed(100 + index)
        x = torch.randn(ROWS, WIDTH)
        with accelerator.accumulate(model):
            loss = model(x).float().square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, {k: v.clone() for k, v in accelerator.get_state_dict(model).items()}, model


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_training_is_the_same_bit_for_bit(precision, accumulate):
    options = {"cpu": True, "mixed_precision": precision, "gradient_accumulation_steps": accumulate}
    accelerator = Accelerator(**options)
    expected, weights, _ = train(accelerator, accelerator.prepare)
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(**options)
    found, same, model = train(
        accelerator, lambda *objects: prepare_hiremate(accelerator, *objects, budget="70%", verbose=False)
    )
    plan = get_plan(accelerator.unwrap_model(model))
    assert plan.predicted_overhead > 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert list(same) == list(weights)
    assert all(torch.equal(same[name], weights[name]) for name in weights)


def test_a_state_is_saved_and_loaded(tmp_path):
    accelerator = Accelerator(cpu=True)
    _, weights, model = train(
        accelerator, lambda *objects: prepare_hiremate(accelerator, *objects, budget="70%", verbose=False), steps=3
    )
    accelerator.save_state(str(tmp_path))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(str(tmp_path))
    found = accelerator.get_state_dict(model)
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_the_environment_gives_the_budget(monkeypatch):
    accelerator = Accelerator(cpu=True)
    monkeypatch.setenv(ENVIRONMENT_BUDGET, "75%")
    _, _, model = train(accelerator, lambda *objects: prepare_hiremate(accelerator, *objects, verbose=False), steps=2)
    assert str(get_plan(model).budget) == "75%"


def test_a_wrong_budget_in_the_environment_names_the_variable(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_BUDGET, "10 bananas")
    model = make()
    with pytest.raises(BudgetError, match=ENVIRONMENT_BUDGET):
        prepare_hiremate(Accelerator(cpu=True), model)
    assert model._compiled_call_impl is None


def test_a_batch_size_that_does_not_fit_is_backed_off_from():
    accelerator = Accelerator(cpu=True)
    tried = []

    @find_executable_batch_size(starting_batch_size=65536)
    def run(batch_size):
        tried.append(batch_size)
        model = prepare_hiremate(accelerator, make(), budget="20 MB", verbose=False)
        for _ in range(2):
            model(torch.randn(batch_size, WIDTH)).square().mean().backward()
        return batch_size

    found = run()
    assert found < 65536
    assert tried[0] == 65536
    assert len(tried) > 1


def test_an_infeasible_budget_is_an_error_that_names_one_that_works():
    accelerator = Accelerator(cpu=True)
    model = prepare_hiremate(accelerator, make(), budget="100 kB", verbose=False)
    with pytest.raises(InfeasibleBudgetError, match="smallest budget found"):
        model(torch.randn(ROWS, WIDTH)).square().mean().backward()


def fake(kind: DistributedType, dynamo: DynamoBackend = DynamoBackend.NO) -> SimpleNamespace:
    plugin = SimpleNamespace(backend=dynamo)
    return SimpleNamespace(distributed_type=kind, state=SimpleNamespace(dynamo_plugin=plugin), is_main_process=True)


@pytest.mark.parametrize(
    "kind", [DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.XLA, DistributedType.MULTI_NPU]
)
def test_what_cannot_work_is_refused_by_name(kind):
    model = make()
    with pytest.raises(ConfigurationError, match=kind.value):
        prepare_hiremate(fake(kind), model, budget="70%")
    assert model._compiled_call_impl is None


def test_compiling_with_accelerate_is_refused():
    with pytest.raises(ConfigurationError, match="dynamo_backend"):
        prepare_hiremate(fake(DistributedType.NO, DynamoBackend.INDUCTOR), make(), budget="70%")


def test_not_exactly_one_module_is_refused():
    with pytest.raises(ConfigurationError, match="found 2"):
        prepare_hiremate(Accelerator(cpu=True), make(), make(), budget="70%")


def test_an_accelerator_that_cannot_prepare_leaves_the_model_alone(monkeypatch):
    accelerator, model = Accelerator(cpu=True), make()

    def fail(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(accelerator, "prepare", fail)
    with pytest.raises(RuntimeError, match="no"):
        prepare_hiremate(accelerator, model, budget="70%")
    assert model._compiled_call_impl is None
