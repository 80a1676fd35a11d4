"""Programs take what a graph takes, give what it gives, and hold nothing longer than they must."""

from __future__ import annotations

import math
import operator
import weakref
from typing import Any

import pytest
import torch
from torch import fx, nn

from hiremate_lightning.rewriting.straight_line import compiled

aten = torch.ops.aten


def run(graph: fx.Graph, *arguments: Any, root: nn.Module | None = None) -> Any:
    taken = list(arguments)
    result = compiled(fx.GraphModule(root or nn.Module(), graph))(taken)
    assert taken == []
    return result


def test_arguments_are_taken_out_of_their_list():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.placeholder("unread")
    graph.output((graph.call_function(aten.sin.default, (x,)), x, None))
    result, same, nothing = run(graph, torch.zeros(1), 7)
    assert result.item() == 0
    assert same.item() == 0
    assert nothing is None


def test_a_graph_may_take_and_give_nothing():
    graph = fx.Graph()
    graph.output(())
    assert run(graph) == ()


def test_values_die_after_their_last_use():
    alive: list[int] = []
    made: list[weakref.ref[torch.Tensor]] = []

    def watched(x: torch.Tensor) -> torch.Tensor:
        result = x + 1
        made.append(weakref.ref(result))
        return result

    def count(x: torch.Tensor) -> torch.Tensor:
        alive.append(sum(reference() is not None for reference in made))
        return x

    graph = fx.Graph()
    x = graph.placeholder("x")
    one, two = (graph.call_function(watched, (x,)) for _ in range(2))
    graph.call_function(watched, (x,))  # nothing reads it
    first = graph.call_function(count, (x,))
    total = graph.call_function(aten.add.Tensor, (one, two))
    second = graph.call_function(count, (x,))
    graph.output((total, first, second))
    run(graph, torch.zeros(1))
    assert alive == [2, 0]


def test_an_argument_dies_after_its_last_use():
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.sin.default, (x,))
    gone = graph.call_function(lambda y: reference() is None, (y,))
    graph.output((gone,))
    argument = torch.zeros(1)
    reference = weakref.ref(argument)
    arguments = [argument]
    del argument
    assert compiled(fx.GraphModule(nn.Module(), graph))(arguments) == (True,)


CONSTANTS = (
    1, -2, 0.1, math.inf, -math.inf, True, None, "text", 1 + 2j, torch.float16, torch.device("cpu"),
    torch.channels_last, slice(1, None, 2), (), (1,), [1, (2, [3])], [math.inf, None], ..., range(3),
)  # fmt: skip


@pytest.mark.parametrize("constant", CONSTANTS, ids=repr)
def test_constants_arrive_as_they_are(constant):
    graph = fx.Graph()
    graph.output((graph.call_function(lambda *a, **k: (a, k), (constant,), {"name": constant}),))
    ((args, kwargs),) = run(graph)
    assert args == (constant,)
    assert kwargs == {"name": constant}
    assert type(args[0]) is type(constant)


def test_a_number_that_is_none_arrives():
    graph = fx.Graph()
    graph.output((graph.call_function(lambda x: x, (math.nan,)),))
    assert math.isnan(run(graph)[0])


def test_values_within_arguments_arrive():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(lambda a, k: (a, k), ([x, (x, None)],), {"k": {"x": x, "y": slice(x, 2)}}),))
    ((args, kwargs),) = run(graph, 5)
    assert args == [5, (5, None)]
    assert kwargs == {"x": 5, "y": slice(5, 2)}


def test_results_of_parts_methods_modules_attributes_are_read():
    root = nn.Module()
    root.inner = nn.Module()
    root.inner.constant = torch.full((2,), 3.0)
    root.layer = nn.Softmax(0)
    graph = fx.Graph()
    x = graph.placeholder("x")
    parts = graph.call_function(aten.split.Tensor, (x, 2))
    parts.meta["val"] = (torch.empty(2), torch.empty(2))
    second = graph.call_function(operator.getitem, (parts, 1))
    constant = graph.get_attr("inner.constant")
    total = graph.call_function(aten.add.Tensor, (second, constant))
    soft = graph.call_module("layer", (total,))
    graph.output((graph.call_method("mul", (soft, 2)), constant))
    found, same = run(graph, torch.arange(4.0), root=root)
    assert torch.equal(found, torch.softmax(torch.tensor([5.0, 6.0]), 0) * 2)
    assert same is root.inner.constant
