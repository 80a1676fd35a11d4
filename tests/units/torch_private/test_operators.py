"""Operators are called as the graph says, whatever Python code is around."""

from __future__ import annotations

import torch

from hiremate_lightning.torch_private.operators import schema_call


def test_a_default_device_changes_nothing():
    made = schema_call(torch.ops.aten.full.default)
    with torch.device("meta"):
        assert torch.full([3], 2.0).device.type == "meta"
        assert made([3], 2.0).device.type == "cpu"


def test_operators_of_others_are_called_as_they_are():
    @torch.library.custom_op("hiremate_tests::add", mutates_args=())
    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Not what `torch.add` does."""
        return x - y

    x, target = torch.ones(4), torch.ops.hiremate_tests.add.default
    assert torch.equal(schema_call(target)(x, x), torch.zeros(4))
