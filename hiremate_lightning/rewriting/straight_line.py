"""Straight-line Python code for an FX graph: calls with least overhead, each value freed after its last use."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ..torch_private import aot, operators
from .nodes import is_part


def compiled(module: fx.GraphModule) -> aot.Boxed:
    """Compile an FX graph to a function that takes its arguments in one list and empties the list."""
    writer = Writer(module)
    return aot.mark_boxed(compile_lines(writer.lines, writer.known, "arguments"))


def compile_lines(lines: Sequence[str], known: dict[str, Any], parameters: str) -> Callable[..., Any]:
    """Compile lines to a function `run` with these parameters and the global names `known`, to which `run` is added."""
    body = "\n ".join(lines)
    exec(compile(f"def run({parameters}):\n {body}\n", "<program of a plan>", "exec"), known)
    run: Callable[..., Any] = known["run"]
    return run


class Writer:
    """Writes a graph's Python source, and stores the objects that the source names; `number` writes integers."""

    def __init__(self, module: fx.GraphModule, number: Callable[[int], str] = repr) -> None:
        self.module, self._number = module, number
        self.names: dict[fx.Node, str] = {}
        self.known: dict[str, Any] = {}  # global names of the lines: functions and constants, by name
        self.name_of_known: dict[Any, str] = {}
        self.lines: list[str] = []  # body of a function whose only parameter is the list `arguments`
        self._write()

    def _write(self) -> None:
        last_reader: dict[fx.Node, fx.Node] = {}
        for node in self.module.graph.nodes:
            last_reader |= dict.fromkeys((node, *node.all_input_nodes), node)
        dying: dict[fx.Node, list[fx.Node]] = {}
        for value, node in last_reader.items():
            dying.setdefault(node, []).append(value)
        taken = []
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                taken.append(self._value(node))
            elif node.op == "get_attr":
                self.names[node] = self._constant(operator.attrgetter(node.target)(self.module))
            elif node.op == "output":
                self.lines.append(f"return {self._argument(node.args[0])}")
            else:
                self.lines.append(f"{self._value(node)} = {self._call(node)}")
            gone = [self.names[value] for value in dying.get(node, ()) if value.op not in ("get_attr", "output")]
            if gone and node.op != "output":
                self.lines.append(f"del {', '.join(gone)}")
        take = [f"[{', '.join(taken)}] = arguments"] if taken else []
        self.lines = [*take, "arguments.clear()", *self.lines]

    def _value(self, node: fx.Node) -> str:
        return self.names.setdefault(node, f"v{len(self.names)}")

    def _constant(self, value: Any) -> str:
        name = f"k{len(self.known)}"
        self.known[name] = value
        return name

    def _call(self, node: fx.Node) -> str:
        if is_part(node):
            return f"{self._argument(node.args[0])}[{node.args[1]!r}]"
        arguments = [self._argument(a) for a in node.args]
        arguments += [f"{name}={self._argument(a)}" for name, a in node.kwargs.items()]
        if node.op == "call_method":
            return f"{arguments[0]}.{node.target}({', '.join(arguments[1:])})"
        target = self.module.get_submodule(str(node.target)) if node.op == "call_module" else operators.shortest(node)
        if target not in self.name_of_known:
            self.name_of_known[target] = self._constant(target)
        return f"{self.name_of_known[target]}({', '.join(arguments)})"

    def _argument(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.names[value]
        if isinstance(value, (tuple, list)):
            inner = "".join(f"{self._argument(v)}, " for v in value)
            return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
        if type(value) is int:
            return self._number(value)
        if value is None or type(value) in (bool, str):
            return repr(value)
        if isinstance(value, dict):
            return f"{{{', '.join(f'{self._argument(k)}: {self._argument(v)}' for k, v in value.items())}}}"
        if isinstance(value, slice):
            return f"slice({', '.join(map(self._argument, (value.start, value.stop, value.step)))})"
        return self._constant(value)
