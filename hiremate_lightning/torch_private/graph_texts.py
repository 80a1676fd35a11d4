"""Graphs without their text: torch writes each graph as code, and names the lines of its logs, though nobody reads it.

Of a step of thousands of nodes that takes a few hundredths of the time to the first plan.
"""

from __future__ import annotations

import functools
import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx
from torch._dynamo import symbolic_convert
from torch._functorch._aot_autograd import graph_compile
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental import proxy_tensor
from torch.utils import _traceback

from .hacks import StandIn, replaced

_LINE_LOGS = symbolic_convert.trace_call_log, symbolic_convert.trace_source_log
_GRAPH_LOGS = graph_compile.aot_joint_log, graph_compile.aot_graphs_log
_shorten = functools.lru_cache(maxsize=1024)(_traceback.shorten_filename)
_STRUCTURED = logging.getLogger("torch.__trace")  # gets all that is logged, where it has handlers


def module_of(root: torch.nn.Module, graph: fx.Graph, name: str = "GraphModule") -> fx.GraphModule:
    """Make a module of a graph, whose code is written when someone reads it or calls the module."""
    return _LazyGraphModule(root, graph, name)


def names_of_lines() -> list[StandIn]:
    """Return stand-ins that save time with texts of lines.

    The path of a file is shortened once, and not for each guard. Dynamo reads no whole file to name the function of a
    line, unless logs show that.
    """
    paths: list[StandIn] = [(_traceback, "shorten_filename", _shorten)]
    if any(log.isEnabledFor(logging.DEBUG) for log in _LINE_LOGS):
        return paths
    return [*paths, (symbolic_convert, "get_funcname", lambda file, line: None)]


def unwritten() -> AbstractContextManager[Any]:
    """Keep AOTAutograd from writing what it traces as text, for a while; nothing changes where torch's logs show it."""
    if _STRUCTURED.handlers or any(log.isEnabledFor(logging.INFO) for log in _GRAPH_LOGS):
        return nullcontext()
    return replaced(
        (graph_compile, "_log_joint_graph", lambda joint, config: None),
        (graph_compile, "_log_fw_bw_graphs", lambda *given: (None, None)),
        (proxy_tensor, "_extract_tensor_metadata", lambda value: None),  # what nodes say of their values once more
    )
