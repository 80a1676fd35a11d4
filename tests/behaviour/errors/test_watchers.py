"""What only watches a step: it is waited for, or taken out of the way, and nothing is learned from it."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.profilers.pytorch import RegisterRecordFunction
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hiremate_lightning import HiRemateWarning, get_plan, hiremate
from hiremate_lightning.testing import captured_count
from tests.exact import Log, differing, drawn, leave_behind, quiet, train_both

WAITS = "ran without its plan, in the memory of plain PyTorch: FlopCounterMode is around it"
batch = drawn(128, 32)


def make() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)))


def step(model: nn.Module, index: int) -> Tensor:
    loss = model(batch(index)).square().mean()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("counted", [(0,), (1, 2), (5,)], ids=str)
def test_steps_that_are_counted_train_as_without_a_plan(counted: tuple[int, ...]):
    def loop(model: nn.Module) -> Log:
        optimizer, log = torch.optim.AdamW(model.parameters()), list[Tensor | None]()
        for index in range(7):
            optimizer.zero_grad()
            if index in counted:
                with FlopCounterMode(display=False) as counter:
                    log.append(step(model, index))
                log.append(torch.tensor(counter.get_total_flops()))
            else:
                log.append(step(model, index))
            optimizer.step()
            log += leave_behind(model)
        return log

    train_both(make, loop, "60%")


def test_a_counter_around_the_first_step_leaves_the_plan_whole():
    model = hiremate(make(), "60%", verbose=False)
    with pytest.warns(HiRemateWarning, match=WAITS), FlopCounterMode(display=False):
        step(model, 0)
    for index in (1, 2, 3):
        step(model, index)

    assert captured_count(model) == 1
    assert get_plan(model) is not None


def test_labels_of_a_profiler_do_not_end_graphs():
    model = hiremate(make(), "60%", verbose=False)
    with RegisterRecordFunction(model):
        found = [list(module._forward_hooks) for module in model.modules()]
        with pytest.warns(HiRemateWarning, match="have no names in the profile"):
            step(model, 0)
        step(model, 1)
        assert [list(module._forward_hooks) for module in model.modules()] == found
    step(model, 2)

    assert captured_count(model) == 1


def hooked_steps(model: nn.Module, is_kept: bool) -> Log:
    """Train with hooks for the gradients of modules, in all steps or in the first one only."""
    log: Log = []
    handles = [part.register_full_backward_hook(lambda m, i, o: log.append(o[0].clone())) for part in list(model)[1:]]
    for index in range(6):
        model.zero_grad()
        log += [step(model, index), *leave_behind(model)]
        if not is_kept:
            for handle in handles:
                handle.remove()
    return log


@pytest.mark.parametrize("is_kept", [False, True])
def test_hooks_of_the_first_step_leave_later_plans_whole(is_kept: bool):
    """Around hooks for gradients nothing is captured: such modules are planned in parts, while hooks are there."""
    torch.manual_seed(0)
    expected = hooked_steps(make(), is_kept)
    torch.manual_seed(0)
    model = hiremate(make(), "60%", verbose=False, on_infeasible="warn")
    with quiet():
        found = hooked_steps(model, is_kept)
    plan = get_plan(model)

    assert not differing(found, expected)
    assert plan is not None
    assert is_kept or plan.planned_peak_bytes <= plan.budget_bytes
