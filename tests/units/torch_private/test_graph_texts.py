"""What torch would write as text is not written, unless its logs show it."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import fx, nn
from torch._dynamo import symbolic_convert
from torch._functorch._aot_autograd import graph_compile

from hiremate_lightning import hiremate
from hiremate_lightning.torch_private import graph_texts


@pytest.fixture
def written(monkeypatch):
    """The graphs that were written as text meanwhile."""
    graphs, write = [], fx.GraphModule.print_readable
    monkeypatch.setattr(
        fx.GraphModule, "print_readable", lambda module, *a, **k: graphs.append(module) or write(module, *a, **k)
    )
    return graphs


def train():
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    hiremate(module, "90%", verbose=False)
    module(torch.randn(4, 8)).sum().backward()


def test_graphs_of_planned_steps_are_not_written_as_text(written, monkeypatch):
    monkeypatch.setattr(graph_texts._STRUCTURED, "handlers", [])  # of pytest's, which reads the logs of all
    train()
    assert not written


def test_graphs_are_written_for_those_who_read_logs(written, caplog):
    caplog.set_level(logging.DEBUG, logger=graph_compile.aot_joint_log.name)
    train()
    assert len(written) >= 3  # joint, forward and backward


def test_lines_of_logs_name_their_functions_where_they_are_shown(caplog):
    assert "get_funcname" in {name for _, name, _ in graph_texts.names_of_lines()}
    caplog.set_level(logging.DEBUG, logger=symbolic_convert.trace_call_log.name)
    assert "get_funcname" not in {name for _, name, _ in graph_texts.names_of_lines()}


def test_the_code_of_a_module_is_written_when_it_is_read_or_called():
    graph = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2))).graph
    root = nn.Sequential(nn.Linear(2, 2))
    module = graph_texts.module_of(root, graph, "Planned")
    x = torch.randn(3, 2)
    assert torch.equal(module(x), root(x))
    assert "def forward" in graph_texts.module_of(root, graph).code
