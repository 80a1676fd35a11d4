"""FSDP2 in two processes: each trains as without a plan, and its peak is the predicted one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from hiremate_lightning.command_line.factory import Workload
from hiremate_lightning.command_line.offline import OfflineOptions, capture_offline
from hiremate_lightning.command_line.without_device import PARTS, SHARDS, Layout, divide, rates_of
from hiremate_lightning.records.schedule import lower
from hiremate_lightning.records.simulation import simulate
from tests.exact import assert_same
from tests.pipelines import BUFFERS_BYTES, PIPELINES, Pipeline
from tests.processes import run_two
from tests.sharding import CASES, SCORED, TOO_SMALL, Case, Left, tokens

pytestmark = pytest.mark.slow
MODELS = [pytest.param(name, marks=pytest.mark.models) for name in ("Trainer", "T5", "ViT")]
TOOLS = ("Accelerate", "Lightning", "ZeRO-1")
Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Run all cases in two processes, once; return what each of them left."""
    return run_two("tests.sharded_processes", tmp_path_factory.mktemp("shards"), timeout=900)


def assert_equal(planned: Left, plain: Left) -> None:
    """Assert that two trainings left the same losses, gradients, weights and evaluations, bit for bit."""
    assert plain.losses
    for name in ("losses", "gradients", "weights", "evaluated"):
        assert_same(getattr(planned, name), getattr(plain, name), name)


@pytest.mark.parametrize("tool", [*TOOLS, *MODELS])
def test_tools_that_shard_train_as_without_a_plan(ranks: Ranks, tool: str):
    for left in ranks:
        plain, planned = left[tool]
        assert_equal(planned, plain)
        (plan,) = planned.plans
        assert plan.schedule.recomputed(plan.graph)
        assert plan.planned_peak_bytes <= plan.budget_bytes < plan.unplanned_peak_bytes
    first, second = (left[tool][1].plans[0] for left in ranks)
    assert first.solution.recompute == second.solution.recompute


@pytest.mark.parametrize("name", MODELS)
def test_models_of_others_stay_within_the_budget(ranks: Ranks, name: str):
    """A tied encoder and decoder, a vision transformer, and what transformers' Trainer trains."""
    for left in ranks:
        plain, planned = left[name]
        (plan,) = planned.plans
        assert planned.warned == []
        assert 0.99 * plan.planned_peak_bytes <= plan.measured.peak_bytes <= plan.budget_bytes
        if plain.peak_bytes:  # measured beside it, which the Trainer's loop leaves no place for
            predicted = plan.planned_peak_bytes - plan.resident_bytes
            assert 0.99 * predicted <= planned.peak_bytes <= 1.001 * predicted
            assert planned.peak_bytes < plain.peak_bytes


def test_the_optimizer_state_of_zero_is_counted_once(ranks: Ranks):
    for left in ranks:
        _, planned = left["ZeRO-1"]
        (plan,) = planned.plans
        parts = dict(plan.resident_parts)
        assert parts["optimizer state"] + parts["parameters"] == planned.resident_bytes


def test_a_budget_too_small_for_one_rank_is_an_error_on_both(ranks: Ranks):
    texts = [left[TOO_SMALL] for left in ranks]
    assert ["is too small" in text for text in texts] == [True, True], texts
    assert ["Another process" in text for text in texts] == [True, False]


@pytest.mark.parametrize("case", [*CASES, *SCORED], ids=str)
def test_a_sharded_model_trains_as_without_a_plan(ranks: Ranks, case: Case):
    """By one plan, made at the second step without warnings, whose peak and resident bytes are the measured ones.

    Where parameters stay whole between backwards, the first one's gathers are counted in the others too. All that is
    resident and not a shard, or an optimizer's state of one, is the batch.
    """
    for left in ranks:
        plain, planned = left[case.name]
        assert_equal(planned, plain)
        assert planned.planned_at == (1 if case.micro == 1 else 0)
        (plan,) = planned.plans
        assert plan.schedule.recomputed(plan.graph)
        predicted = plan.planned_peak_bytes - plan.resident_bytes
        if case.gloo:  # it frees the buffers of collectives inside of graphs, unseen
            assert predicted < plan.unplanned_peak_bytes - plan.resident_bytes
            continue
        assert planned.warned == []
        assert (0.8 if case.keeps else 0.99) * predicted <= planned.peak_bytes <= 1.001 * predicted
        assert plan.measured.peak_bytes is not None
        assert plan.measured.peak_bytes <= plan.budget_bytes
        assert planned.peak_bytes < plain.peak_bytes
        if case.micro == 1:
            assert plan.resident_bytes == planned.resident_bytes + case.rows * case.length * 8


@pytest.mark.parametrize("case", PIPELINES, ids=str)
def test_stages_of_a_pipeline_train_as_without_a_plan(ranks: Ranks, case: Pipeline):
    """The peak of an iteration is that of its largest piece, as predicted, with the graphs that wait beside it.

    Without a plan it would exceed the budget. By how much depends on PyTorch: since 2.15 the buffers that a stage
    receives its inputs in are allocated in each iteration, planned or not, and outputs hold them to its end.
    """
    assert ranks[1][case.name][0].losses
    for left in ranks:
        plain, planned = left[case.name]
        for name in ("losses", "gradients", "weights"):
            assert_same(getattr(planned, name), getattr(plain, name), name)
        assert planned.warned == []
        measured = [plan for plan in planned.plans if plan.measured.peak_bytes is not None]
        assert all(max(plan.measured.peak_bytes, plan.planned_peak_bytes) <= plan.budget_bytes for plan in measured)
        found = max(plan.measured.peak_bytes for plan in measured)
        predicted = max(plan.compared_peak_bytes for plan in measured)
        assert 0.85 * predicted <= found <= 1.01 * predicted
        buffers = 2 * BUFFERS_BYTES  # of the stage, outputs and gradients of outputs: no tensors of the model
        assert found - buffers <= planned.peak_bytes + planned.resident_bytes <= found + buffers
        assert plain.peak_bytes + plain.resident_bytes > max(plan.budget_bytes for plan in measured)
        assert planned.peak_bytes < plain.peak_bytes


class Both(Layout):
    """Shards of parts, also where there is one shard or one part, as in a script that makes the mesh itself."""

    def spread(self, root: nn.Module, mesh: Any) -> None:
        divide(root, mesh[PARTS])
        for module in [*self.units_of(root), root]:
            fully_shard(module, mesh=mesh[SHARDS])


def layout_of(case: Case) -> Layout:
    if case.parts:
        return Layout(parts=2) if len(case.mesh) == 1 else Both(*case.mesh)
    return Layout(2, dtype=torch.bfloat16 if case.bf16 else None)


@pytest.mark.parametrize("case", SCORED, ids=str)
def test_a_step_without_processes_has_the_measured_peak(ranks: Ranks, case: Case):
    """What `hiremate plan` with --fsdp or --tp predicts of the plan that the processes ran by is what they measured."""
    workload = Workload(lambda: (case.model(), tokens(0, 0, case)), case.name)
    captured = capture_offline(workload, OfflineOptions(layout=layout_of(case), zero_grad="before"))  # as there
    step = captured.estimated(rates_of(torch.device("cpu")))
    for left in ranks:
        _, planned = left[case.name]
        (plan,) = planned.plans
        schedule = lower(step.graph, plan.solution.recompute)
        assert captured.resident_bytes == plan.resident_bytes
        predicted = simulate(step.graph, step.profile, schedule).peak_bytes
        assert predicted == pytest.approx(planned.peak_bytes, rel=0.01)


def test_ranks_train_on_different_batches_and_shards(ranks: Ranks):
    """What is compared above would be the same for two processes that know nothing of each other."""
    first, second = (left["GPT"][0] for left in ranks)
    assert not torch.equal(first.losses[0], second.losses[0])
    assert not torch.equal(first.weights["head.weight"], second.weights["head.weight"])
