"""Assignments to parts of tensors are one operation each, copy nothing that eager PyTorch doesn't, and stay exact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hiremate_lightning import hiremate
from hiremate_lightning.capturing.capture import Captured
from hiremate_lightning.rewriting.assignments import assign, assign_to_new
from tests.exact import captured_by, captured_graphs, drawn, network, simple_loop, train_both

ROWS, WIDTH = 48, 32
rows = drawn(ROWS, WIDTH)


@network(
    lambda function: {
        "function": function,
        "layers": nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)),
        "last": nn.Linear(WIDTH, 8),
        "memory": torch.zeros(ROWS, WIDTH),
    }
)
def computes(self, x: Tensor) -> Tensor:
    """Runs a function of its four layers and its input, after one layer, so that gradients are the backward's own."""
    return self.last(self.function(self, self.layers, self.layers[0](x).tanh()))


def captured_of(function: Callable[..., Any]) -> Captured:
    return captured_by(computes(function), rows(0))


def ops(captured: Captured) -> Counter[str]:
    return Counter(node.op.removeprefix("hiremate.").removeprefix("aten.") for node in captured.graph.nodes)


def into_zeros(_: Any, f: Any, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:12, 4:20] = f[1](x)[:12, 4:20]
    out[-12:, :16] = f[2](x)[-12:, :16]
    return out


def into_empty(_: Any, f: Any, x: Tensor) -> Tensor:
    out = x.new_empty(ROWS, WIDTH)
    out[::2], out[1::2] = f[1](x)[::2], f[2](x)[1::2]
    return out


def into_a_value(_: Any, f: Any, x: Tensor) -> Tensor:
    y = f[1](x)
    y[3:, -5:] = f[2](x)[3:, -5:]
    return y


def steps_of_a_loop(_: Any, f: Any, x: Tensor) -> Tensor:
    out, state = torch.empty_like(x), torch.zeros(WIDTH)
    for step in range(5):
        state = torch.tanh(f[1](x[step]) + f[2](state))
        out[step] = state
    out[5:] = 0.5
    return out


def shifted(_: Any, f: Any, x: Tensor) -> Tensor:
    y = f[1](x)
    y[:, 1:] = y[:, :-1].clone()
    y[:-1] = y[1:] * 2
    return y


def read_between(_: Any, f: Any, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:8] = f[1](x)[:8]
    z = f[2](y * 2)
    y[8:16] = z[8:16]
    return y + z


def diagonal(_: Any, f: Any, x: Tensor) -> Tensor:
    y = f[1](x)
    y.diagonal(3).copy_(f[2](x).diagonal(3))
    return y


def part_of_a_part(_: Any, f: Any, x: Tensor) -> Tensor:
    y = f[1](x).view(4, 12, WIDTH)
    y[1, 2:6, ::3] = f[2](x).view(4, 12, WIDTH)[2, 2:6, ::3]
    return y.view(ROWS, WIDTH)


def changed_part(_: Any, f: Any, x: Tensor) -> Tensor:
    y = f[1](x)
    y[:, 8:24] *= f[2](x)[:, 8:24]
    y[5] += 1
    return y


def one_number(_: Any, f: Any, x: Tensor) -> Tensor:
    y = f[1](x)
    y[:, 3] = 0
    y[7] = f[2](x)[0, 0]
    return y


def part_of_a_wider_type(_: Any, f: Any, x: Tensor) -> Tensor:
    out = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    out[:, :20] = f[1](x)[:, :20]
    return f[2](out.float())


def columns_first(_: Any, f: Any, x: Tensor) -> Tensor:
    out = torch.zeros_like(f[1](x).t())
    out[2:30] = f[2](x).t()[2:30]
    return out.t()


def read_by_columns(_: Any, f: Any, x: Tensor) -> Tensor:
    out = f[1](x[:WIDTH])
    out[2:30] = f[2](x[:WIDTH])[2:30]
    return out.t().contiguous().tanh()


def masked(_: Any, f: Any, x: Tensor) -> Tensor:
    y = f[1](x)
    y[x > 0.3] = 0.1
    return y.masked_fill(x < -0.5, 2.0)


def picked(_: Any, f: Any, x: Tensor) -> Tensor:
    index = torch.arange(ROWS).flip(0) // 2
    y = f[1](x)[index]
    return torch.zeros_like(x).index_add(0, index, f[2](y)) + y.gather(1, index[:, None].expand(-1, WIDTH) % WIDTH)


def in_a_buffer(module: Any, f: Any, x: Tensor) -> Tensor:
    module.memory[:8] = f[1](x)[:8].detach()
    return f[2](x) + module.memory


def complex_numbers(_: Any, f: Any, x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft2(f[1](x))
    out = torch.zeros_like(spectrum)
    out[:6, :6] = spectrum[:6, :6] * 0.5
    out[-6:, :6] = spectrum[-6:, :6].conj()
    return torch.fft.irfft2(out, s=x.shape)


FUNCTIONS = (
    into_zeros, into_empty, into_a_value, steps_of_a_loop, shifted, read_between, diagonal, part_of_a_part,
    changed_part, one_number, part_of_a_wider_type, columns_first,
    read_by_columns, masked, picked, in_a_buffer, complex_numbers,
)  # fmt: skip
SCATTERS = ("slice_scatter", "select_scatter", "diagonal_scatter", "copy.")


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_assignments_train_exactly_within_the_planned_peak(function):
    plan = train_both(lambda: computes(function), simple_loop(rows), "70%", on_infeasible="warn")
    assert plan.measured.peak_bytes <= plan.planned_peak_bytes
    assert not [node.op for node in plan.graph.nodes if node.op.removeprefix("aten.").startswith(SCATTERS)]


@pytest.mark.parametrize(
    "function",
    [into_zeros, into_a_value, steps_of_a_loop, columns_first, masked, complex_numbers],
    ids=lambda f: f.__name__,
)
def test_training_on_one_number_expanded_is_exact(function):
    """Products make a copy of such a gradient."""
    train_both(lambda: computes(function), simple_loop(rows, loss_of=lambda y: y.sum()), "1 GiB")


@pytest.mark.parametrize(
    ("function", "made", "assigned"),
    [(into_zeros, 1, 1), (into_empty, 1, 1), (into_a_value, 0, 2), (steps_of_a_loop, 1, 5), (read_between, 1, 2)],
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_assignments_on_end_are_one(function, made, assigned):
    found = ops(captured_of(function))
    assert found[assign_to_new.__name__] == made
    assert found[assign.__name__] == assigned  # in the backward one after the other: each hands out a gradient before


def test_what_is_assigned_to_keeps_nothing_that_it_is_made_like():
    captured = captured_of(complex_numbers)
    graph = captured.graph
    (made,) = (n for n in graph.nodes if n.op == "hiremate.assign_to_new" and n.direction == "forward")
    sizes = [graph.storages[graph.tensors[t].storage].size_bytes for t in made.inputs]
    assert max(sizes) < graph.storages[graph.tensors[made.outputs[0]].storage].size_bytes


@pytest.mark.parametrize("function", [into_zeros, into_empty, into_a_value, complex_numbers], ids=lambda f: f.__name__)
def test_the_backward_assigns_in_place(function):
    captured = captured_of(function)
    backward = {n for i, n in enumerate(captured.fx_nodes) if i in set(captured.graph.backward) and n.target is assign}
    assert backward
    assert backward <= captured.overwrites.keys()


def test_what_the_caller_laid_out_is_copied():
    """Its strides are known only when it comes."""

    def function(x: Tensor) -> Tensor:
        y = x * 2
        y[:3] = 1
        return y

    @network(lambda: {"layer": nn.Linear(WIDTH, WIDTH)})
    def last(self, x: Tensor) -> Tensor:
        return function(self.layer(x))

    module = hiremate(last(), "100%", verbose=False)
    module(rows(0)).sum().backward()
    captured = captured_graphs(module)[0]
    assert not [node for node in captured.overwrites if node.target is assign]
    train_both(last, simple_loop(rows, loss_of=lambda y: y.sum()), "100%")
    train_both(last, simple_loop(rows, loss_of=lambda y: (y.t().contiguous() ** 3).sum()), "100%")


def test_assign_leaves_what_it_assigns_to_as_it_was():
    base, part = torch.randn(6, 5), torch.randn(2, 5)
    before = base.clone()
    path = (("slice", (0, 1, 3, 1)),)
    found = assign(base, path, part)
    assert torch.equal(base, before)
    before[1:3] = part
    assert torch.equal(found, before)
    assert assign(base, path, part, out=base) is base
    assert torch.equal(base, before)
    assert torch.equal(
        assign_to_new((6, 5), 2.0, (torch.float32, torch.device("cpu")), path, part)[[0, 1]],
        torch.stack([torch.full((5,), 2.0), part[0]]),
    )
