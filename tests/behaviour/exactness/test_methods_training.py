"""Each strategy trains networks by its own schedule, bit for bit as plain PyTorch, within a budget that it meets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hiremate_lightning.capturing.backend import planning_backend
from hiremate_lightning.measuring.profiling import CostCache, measure
from hiremate_lightning.memory.metering import measure_peak
from hiremate_lightning.planning.solvers.base import Problem, SolveOptions, get_strategy, strategy_names
from hiremate_lightning.planning.solvers.model import StepModel
from hiremate_lightning.records.schedule import keep_all
from tests.behaviour.exactness.test_execution import Conductor
from tests.exact import network
from tests.models import GPT, UNet

METHODS = tuple(name for name in strategy_names() if name != "none")
BUDGETS = (55, 65, 75, 85)  # per cent of the peak of plain training: the first that a method meets
Batch = tuple[Tensor, ...]


@network(lambda net, loss_of: {"net": net, "loss_of": loss_of})
def with_loss(self, *batch: Tensor) -> Tensor:
    """A network and its loss, in one graph."""
    return self.loss_of(self.net, *batch)


def gpt() -> tuple[nn.Module, Batch]:
    def loss_of(net: nn.Module, tokens: Tensor) -> Tensor:
        return F.cross_entropy(net(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())

    return with_loss(GPT(blocks=3, width=32, heads=2, context=32), loss_of), (torch.randint(256, (4, 32)),)


def unet() -> tuple[nn.Module, Batch]:
    def loss_of(net: nn.Module, noisy: Tensor, picture: Tensor) -> Tensor:
        return F.mse_loss(net(noisy), picture)

    return with_loss(UNet(width=8, depth=2), loss_of), (torch.randn(2, 3, 32, 32), torch.randn(2, 3, 32, 32))


def t5() -> tuple[nn.Module, Batch]:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 64}
    config = T5Config(use_cache=False, decoder_start_token_id=0, **sizes)

    def loss_of(net: nn.Module, tokens: Tensor) -> Tensor:
        return net(input_ids=tokens, labels=tokens).loss

    return with_loss(T5ForConditionalGeneration(config), loss_of), (torch.randint(64, (4, 32)),)


@dataclass
class Captured:
    """A network that was captured once, and what plain training gives."""

    module: nn.Module
    batch: Batch
    call: Callable[..., Tensor]  # runs it by the schedule of the conductor
    conductor: Conductor  # decides the schedule
    problem: Problem  # its step, with the peak of plain training for a budget
    start: dict[str, Tensor]  # its state before the first step
    expected: list[Tensor]  # what plain training gives


def train(module: nn.Module, batch: Batch, call: Callable[..., Tensor], start: dict[str, Tensor]) -> list[Tensor]:
    """Take two AdamW steps from a state; list losses, gradients, parameters, buffers and the random state."""
    module.load_state_dict(start)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    torch.manual_seed(5)
    log = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = call(*batch)
        loss.backward()
        log += [loss.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]
        optimizer.step()
    return [*log, *(t.clone() for t in module.state_dict().values()), torch.get_rng_state()]


@pytest.fixture(scope="module", params=[gpt, unet, pytest.param(t5, marks=pytest.mark.models)])
def captured(request: pytest.FixtureRequest) -> Iterator[Captured]:
    torch.manual_seed(3)
    module, batch = request.param()
    module.train()
    start = {name: value.clone() for name, value in module.state_dict().items()}
    expected = train(module, batch, module, start)
    torch.compiler.reset()
    conductor = Conductor(keep_all)
    call = torch.compile(module, backend=planning_backend(conductor.take_in), dynamic=False)
    train(module, batch, call, start)
    (part,) = conductor.runtimes
    problem = Problem(part.captured.graph, measure(part.captured, CostCache()), 0, SolveOptions(time_limit_s=1.0))
    problem = replace(problem, budget_bytes=StepModel(problem).keep_all_bytes)
    yield Captured(module, batch, call, conductor, problem, start, expected)
    torch.compiler.reset()


@pytest.mark.parametrize("name", METHODS)
def test_training_by_a_method_is_exact_and_within_its_budget(captured: Captured, name: str):
    for percent in BUDGETS:
        budget = captured.problem.budget_bytes * percent // 100
        solution = get_strategy(name)(replace(captured.problem, budget_bytes=budget))
        if solution.is_feasible:
            break
    assert solution.recompute_ms > 0
    captured.conductor.decide = lambda graph: solution.recompute
    found = train(captured.module, captured.batch, captured.call, captured.start)
    assert all(torch.equal(a, b) for a, b in zip(found, captured.expected, strict=True))
    captured.module.zero_grad()
    assert measure_peak(lambda: captured.call(*captured.batch).backward()) <= budget
