"""Traces show what norms hand on in the types that kernels give it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from hiremate_lightning import hiremate
from tests.exact import captured_by, recorded, simple_loop, train_both

aten = torch.ops.aten
ROWS, CHANNELS = 32, 16
NORMS = {
    "layer": lambda: nn.LayerNorm(CHANNELS),
    "layer without bias": lambda: nn.LayerNorm(CHANNELS, bias=False),
    "layer without parameters": lambda: nn.LayerNorm(CHANNELS, elementwise_affine=False),
    "group": lambda: nn.GroupNorm(4, CHANNELS),
    "group without parameters": lambda: nn.GroupNorm(4, CHANNELS, affine=False),
    "batch": lambda: nn.BatchNorm1d(CHANNELS),
    "batch without parameters": lambda: nn.BatchNorm1d(CHANNELS, affine=False),
    "batch without running statistics": lambda: nn.BatchNorm1d(CHANNELS, track_running_stats=False),
    "instance": lambda: nn.Sequential(nn.Unflatten(1, (4, 4)), nn.InstanceNorm1d(4, affine=True), nn.Flatten()),
}


class Normed(nn.Module):
    def __init__(self, norm: str) -> None:
        super().__init__()
        linear = (nn.Linear(CHANNELS, CHANNELS) for _ in range(3))
        self.layers = nn.Sequential(*(nn.Sequential(each, NORMS[norm](), nn.SiLU()) for each in linear))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layers(x)


class Compare(fx.Interpreter):
    """Runs a graph, and compares what each node gives with what its trace shows."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, torch.Tensor):
            shown = n.meta["val"]
            assert (result.dtype, result.shape) == (shown.dtype, shown.shape), n.format_node()
        return result


@pytest.mark.parametrize("norm", NORMS)
def test_values_are_shown_in_the_types_that_kernels_give(norm):
    joint = captured_by(Normed(norm), torch.randn(ROWS, CHANNELS)).joint
    shown = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")]
    Compare(joint).run(*(torch.rand(value.shape).to(value.dtype) for value in shown))


@pytest.mark.parametrize("norm", NORMS)
def test_all_operations_can_be_measured(norm):
    with recorded() as warned:
        model = hiremate(Normed(norm), "80%", on_infeasible="warn", verbose=False)
        model(torch.randn(ROWS, CHANNELS)).float().square().mean().backward()
    assert not [text for text in warned if "can't be measured" in text]


@pytest.mark.parametrize("norm", NORMS)
def test_training_is_exact(norm):
    train_both(lambda: Normed(norm), simple_loop(lambda index: torch.randn(ROWS, CHANNELS)))


def test_the_gradient_of_a_group_norm_is_not_copied():
    joint = captured_by(Normed("group"), torch.randn(ROWS, CHANNELS)).joint
    gradients = joint.graph.find_nodes(op="call_function", target=aten.native_group_norm_backward.default)
    readers = {user.target for node in gradients for part in node.users if part.args[1] == 0 for user in part.users}
    assert len(gradients) == 3
    assert aten._to_copy.default not in readers
