"""What only watches a step: it is waited for, or taken out of the way, and nothing is learned from it."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.profilers.pytorch import RegisterRecordFunction
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hiremate_lightning import HiRemateWarning, get_plan, hiremate
from hiremate_lightning.testing import captured_count
from tests.exact import Log, leave_behind, train_both

WAITS = "ran without its plan, in the memory of plain PyTorch: FlopCounterMode is around it"


def make() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)))


def batch(index: int) -> Tensor:
    return torch.randn(128, 32, generator=torch.Generator().manual_seed(index))


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
