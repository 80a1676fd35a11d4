"""Code whose saved values are offloaded gives the bits of a plain run, in less memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hiremate_lightning.measuring.saved_offload import Files, SavedOffload
from hiremate_lightning.memory.metering import MemoryMeter, measure_peak
from hiremate_lightning.proofs.differences import differences
from hiremate_lightning.proofs.trials import Trial, TrialOutcome
from hiremate_lightning.torch_private import tensor_state
from tests.exact import network

WIDTH, ROWS, DEPTH = 64, 512, 8
LEAST_BLOCKS = 4  # of the size of a layer's output, for values of the forward: 8 to 34 in a plain step
GRADIENT_BLOCKS = 3  # that live beside these


def make_plain() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Tanh()) for _ in range(DEPTH)])


def make_with_state() -> nn.Module:
    """Batch norms, dropouts, changes in place and residual connections."""

    @network(lambda: {"linear": nn.Linear(WIDTH, WIDTH), "norm": nn.BatchNorm1d(WIDTH), "count": torch.zeros(())})
    def block(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x + F.relu(F.dropout(self.norm(self.linear(x)), 0.3), inplace=True) * self.count

    return nn.Sequential(*[block() for _ in range(DEPTH)])


def make_with_autocast() -> nn.Module:
    @network(lambda: {"layers": make_plain()})
    def half(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.layers(x)
        return y.float() * 2

    return half()


def make_with_vmap() -> nn.Module:
    """A mask that torch.func maps a function over: Dynamo reads what enters and leaves that as nodes."""

    @network(lambda: {"layers": make_plain()})
    def masked(self, x: Tensor) -> Tensor:
        of_columns = torch.func.vmap(lambda row, column: (row + column) % 3 > 0, in_dims=(None, 0))
        mask = torch.func.vmap(of_columns, in_dims=(0, None))(torch.arange(ROWS), torch.arange(WIDTH))
        return self.layers(x).masked_fill(~mask, 0.0)

    return masked()


def captured(make: Callable[[], nn.Module]) -> tuple[torch.fx.GraphModule, Trial]:
    """Capture a module, and prepare a trial of it with its gradients."""
    torch.manual_seed(0)
    found: list[tuple[torch.fx.GraphModule, list[Tensor]]] = []

    def backend(module, inputs):
        found.append((module, inputs))
        return module.forward

    model = make()
    torch.compile(model, backend=backend, dynamic=False, fullgraph=True)(torch.randn(ROWS, WIDTH))
    ((module, inputs),) = found
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    return module, Trial(inputs, names, with_gradients=True)


def run_offloaded(module: torch.fx.GraphModule, trial: Trial) -> TrialOutcome:
    stay = tensor_state.storages_among((*trial.arguments, *module.parameters(), *module.buffers()))
    return trial.run(module, SavedOffload(stay))


@pytest.mark.parametrize("make", [make_plain, make_with_state, make_with_autocast, make_with_vmap])
def test_code_that_offloads_gives_the_bits_of_a_plain_run(make):
    module, trial = captured(make)
    assert differences(trial.run(module), run_offloaded(module, trial)) == ([], [])


@pytest.mark.parametrize("make", [make_plain, make_with_state, make_with_autocast])
def test_saved_values_are_moved_to_files(make):
    code, trial = captured(make)
    plain, block_bytes, found = trial.run(code), ROWS * WIDTH * 4, list[TrialOutcome]()
    in_files = replace(trial, files=Files())
    peak_bytes = measure_peak(lambda: found.append(run_offloaded(code, in_files)))
    assert peak_bytes <= (LEAST_BLOCKS + GRADIENT_BLOCKS) * block_bytes
    assert differences(plain, found[0]) == ([], [])


@pytest.mark.usefixtures("no_automatic_collection")
def test_files_go_with_the_graph_that_needs_them():
    """PyTorch counts their release: while a step is measured it would pass for memory that the step gives back."""
    code, trial = captured(make_plain)
    block_bytes = ROWS * WIDTH * 4
    with MemoryMeter(torch.device("cpu")) as meter:
        run_offloaded(code, replace(trial, files=Files()))
        meter.mark("end")
    assert meter.intervals[-1].start_bytes < block_bytes
