"""Evaluate data-dependent branches while Dynamo traces them, and guard the outcome; otherwise the graph breaks there.

The few operations that compute a condition run on the CPU at once, and tracing goes on with its value. Only integers
and booleans are computed, by operations that give the same result on each device; masks may be floats that are selected
and compared, not computed with. A guard evaluates the condition again at other sizes, and before each call if it
depends on input values; another outcome captures the code again. Changes in place run on copies; a branch is not
evaluated if copies may differ. A number that depends on inputs is specialised to its first value, if these have few
elements.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import itertools
import math
import operator
import re
import types
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch._dynamo.guards import GuardBuilder, _get_closure_vars, install_guard
from torch._dynamo.source import GlobalStateSource
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import TensorVariable
from torch._guards import Guard
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from .. import thresholds
from ..housekeeping import log
from . import tensor_state
from .facts import expect, size_of
from .hacks import StandIn, around, replaced
from .regions.module_traces import note_unseen, realized
from .tensor_state import storage_id, storages_among

_Read = Callable[[torch.Tensor], Any]  # returns a Python value of a tensor
_SIZES_KEPT = 4096  # sizes for which a guard's result is cached
_MOST_NUMBERS = 64  # input elements that a specialised number may depend on
_MOST_FORKS = 3  # branches of a code object with both outcomes: it has one path more
_EXACT = {  # functions and methods that select, move or compare floats without arithmetic
    *("full", "zeros", "ones", "tensor", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"),
    *("max", "min", "amax", "amin", "maximum", "minimum", "clamp", "clip", "where", "masked_fill", "max_pool1d"),
    *("tril", "triu", "roll", "flip", "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "expand"),
    *("expand_as", "broadcast_to", "repeat", "repeat_interleave", "tile", "permute", "transpose", "movedim", "t"),
    *("narrow", "select", "getitem", "cat", "concat", "stack", "chunk", "split", "unbind", "gather", "index_select"),
    *("take", "to", "type", "float", "double", "clone", "contiguous", "detach"),
}
_NAMES = {  # deterministic functions of torch, operators of Python, and methods of tensors
    *_EXACT,
    *("arange", "linspace", "eye", "add", "sub", "mul", "neg", "floordiv", "mod", "remainder", "abs", "sign"),
    *("square", "eq", "ne", "lt", "le", "gt", "ge", "and", "and_", "or", "or_", "xor", "invert", "inv", "isin"),
    *("logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_not", "all"),
    *("any", "sum", "diff", "cumsum", "cumprod", "_is_all_true", "_is_any_true", "prod", "count_nonzero", "meshgrid"),
    *("long", "int", "bool"),
}
_WITH_INDICES = {"max", "min"}  # along a dimension: devices return different indices of equal elements
_FOUND = (getattr(owner, name, None) for owner in (torch, operator) for name in _NAMES)
_FUNCTIONS = {function for function in _FOUND if function is not None}
_NAMELESS = {functional.max_pool1d: "max_pool1d"}  # dispatches to one of two functions by an argument
_FUNCTIONS |= set(_NAMELESS)
_IN_PLACE = {name for name in dir(operator) if name.startswith("i") and f"__{name}__" in dir(operator)}
_IN_PLACE = _IN_PLACE - {"index", "inv", "invert"} | {"setitem", "delitem"}
_WRITES = {"setitem", "fill_", "zero_", "copy_", *(f"{name}_" for name in _NAMES)}  # that this module evaluates
_BRANCHES = re.compile(r"POP_JUMP_(FORWARD_|BACKWARD_)?IF_(TRUE|FALSE)|UNARY_NOT")  # instructions on truth values


class _Computation:
    """A copy of the `needed` nodes, which compute a tensor: it holds no reference to Dynamo's graph."""

    def __init__(self, result: fx.Node, needed: set[fx.Node]) -> None:
        self.writes = _expect_unchanged(result.graph, needed)  # whether a needed node changes a tensor in place
        graph, numbers, copies = fx.Graph(), dict[Any, fx.Node](), dict[fx.Node, Any]()
        nodes = [node for node in result.graph.nodes if node in needed]
        inputs = [node for node in nodes if node.op == "placeholder"]
        for node in nodes:
            shown = [_value_of(value) for value in node.all_input_nodes if _is_number(value)]
            for value in tensor_state.leaves([node.args, dict(node.kwargs), shown]):
                if isinstance(value, torch.SymInt) and value.node.expr not in numbers:
                    numbers[value.node.expr] = graph.placeholder(f"number_{len(numbers)}")

        def copy(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return copies[value] if value in needed else fx.node.map_aggregate(_value_of(value), copy)
            return numbers[value.node.expr] if isinstance(value, torch.SymInt) else _on_the_cpu(value)

        for node in inputs:
            copies[node] = graph.placeholder(node.name)
        for node in nodes:
            if node not in copies:
                arguments, named = fx.node.map_aggregate((node.args, dict(node.kwargs)), copy)
                copies[node] = graph.create_node(node.op, node.target, arguments, named)
        graph.output(copies[result])
        self._run, self._numbers = fx.GraphModule({}, graph).forward, list(numbers)
        self._shapes = [list(map(size_of, value.shape)) for node in nodes for value in _tensors_of(node)]
        sizes = (size for shape in self._shapes for size in shape if not isinstance(size, int))
        symbols = (expression.free_symbols for expression in (*self._numbers, *sizes))
        self.symbols = sorted(set[Any]().union(*symbols), key=str)  # symbolic sizes that the tensor depends on

    def at(self, *arguments: Any) -> torch.Tensor:
        """Compute the tensor for values of the symbols, then of the inputs; raise `NotShownError` if too large."""
        sizes, tensors = arguments[: len(self.symbols)], arguments[len(self.symbols) :]
        values = dict(zip(self.symbols, sizes, strict=True))
        for shape in self._shapes:
            numbers = [size if isinstance(size, int) else int(size.xreplace(values)) for size in shape]
            expect(math.prod(numbers) <= thresholds.current.decided_values, "few elements")
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            read = [tensor.cpu().clone() if self.writes else tensor.cpu() for tensor in tensors]
            result: torch.Tensor = self._run(*(int(number.xreplace(values)) for number in self._numbers), *read)
        return result


def _value_of(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _is_number(node: fx.Node) -> bool:
    """Whether a node's value is a number or a shape, not a tensor."""
    return isinstance(_value_of(node), (int, torch.SymInt, torch.Size))


def _nodes_behind(result: fx.Node) -> set[fx.Node]:
    """Return the nodes that compute a tensor, back to numbers and inputs; raise `NotShownError` at an unknown one."""
    needed, ahead = set[fx.Node](), [result]
    while ahead:
        node = ahead.pop()
        if node not in needed:
            if not (_is_input(node) or _is_write(node)):
                _expect_supported(node)
            needed.add(node)
            ahead += [value for value in node.all_input_nodes if not _is_number(value)]
        if not ahead:
            storages = storages_among(value for node in needed for value in _tensors_of(node))
            writes = (node for node in result.graph.nodes if node not in needed and _is_write(node))
            ahead += [write for write in writes if not storages.isdisjoint(_written_by(write))]
    return needed


def _is_write(node: fx.Node) -> bool:
    """Whether a node changes its first argument in place by an operation that this module evaluates."""
    return _name_of(node) in _WRITES and bool(node.args) and isinstance(node.args[0], fx.Node) and _is_of_torch(node)


def _written_by(write: fx.Node) -> set[int]:
    """Return the storage id of the tensor that a node changes in place."""
    return storages_among(_tensors_of(write.all_input_nodes[0]))


def _is_input(node: fx.Node) -> bool:
    """Whether a node is an input of the captured code: a plain tensor of integers or booleans."""
    argument = node.meta.get("grapharg") if node.op == "placeholder" else None
    if argument is None or argument.source is None or argument.pass_arg_as_tensor:
        return False
    return type(argument.example) is torch.Tensor and all(map(_is_whole, _tensors_of(node)))


def _expect_supported(node: fx.Node) -> None:
    is_method = node.op == "call_method" and _name_of(node) in _NAMES
    is_supported = is_method or (node.op == "call_function" and node.target in _FUNCTIONS)
    values = _tensors_of(node)
    is_supported = is_supported and (len(values) == 1 or _name_of(node) not in _WITH_INDICES)
    is_exact = all(map(_is_plain if _name_of(node) in _EXACT else _is_whole, values))
    is_of_fractions = not all(_is_whole(value) for source in node.all_input_nodes for value in _tensors_of(source))
    makes_integers = any(_is_whole(value) and value.dtype != torch.bool for value in values)
    # A float outside of the integer's range converts differently on a GPU.
    expect(not (is_of_fractions and makes_integers), f"{node.target} of fractions")
    expect(is_supported and "out" not in node.kwargs and bool(values) and is_exact, f"{node.op} {node.target}")


def _name_of(node: fx.Node) -> str:
    """Return the name of an operation, "eq" for `tensor.__eq__`."""
    target: Any = node.target
    name = target if isinstance(target, str) else _NAMELESS.get(target, getattr(target, "__name__", ""))
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name


def _is_whole(value: torch.Tensor) -> bool:
    """Whether a tensor is strided, of no subclass, and of integers or booleans."""
    return _is_plain(value) and not value.dtype.is_floating_point and not value.dtype.is_complex


def _is_plain(value: torch.Tensor) -> bool:
    return value.layout is torch.strided and type(value) in (torch.Tensor, FakeTensor)


def _tensors_of(node: fx.Node) -> list[torch.Tensor]:
    return tensor_state.tensors_among(_value_of(node))


def _expect_unchanged(graph: fx.Graph, needed: set[fx.Node]) -> bool:
    """Return whether needed nodes change tensors in place; raise if other nodes change, or may change, their tensors.

    Three signs count: the operation's name, the tensor's version, and code outside of PyTorch, which may change its
    arguments without showing either.
    """
    values, writes = [value for node in needed for value in _tensors_of(node)], list(filter(_is_write, needed))
    storages, written = storages_among(values), [_written_by(write) for write in writes]
    counts = ((value._version, sum(storage_id(value) in of_one for of_one in written)) for value in values)
    expect(all(version <= count for version, count in counts), "not changed in place")
    inputs = {node: node.meta["grapharg"].example for node in needed if node.op == "placeholder"}
    if writes:
        shown = inputs.values()
        is_shared = len(storages_among(shown)) < len(shown) or not all(tensor.is_contiguous() for tensor in shown)
        is_alike = not is_shared and len({value.device for value in values}) <= 1
        expect(is_alike, "memory that is shared on the CPU alike")
    others = (node.meta.get("grapharg") for node in graph.find_nodes(op="placeholder") if node not in inputs)
    examples = (argument.example for argument in others if argument is not None)
    reached = storages_among(value for value in examples if isinstance(value, torch.Tensor))
    expect(reached.isdisjoint(storages_among(inputs.values())), "memory of its own")  # other arguments may change
    shared = set(needed)
    for node in graph.nodes:
        if node.op != "placeholder" and (node in shared or not shared.isdisjoint(node.all_input_nodes)):
            shared.add(node)
            name = _name_of(node)
            changes = name in _IN_PLACE or (name.endswith("_") and name not in _NAMES)
            expect((not changes or node in writes) and "out" not in node.kwargs, f"{node.target} not in place")
            arguments = itertools.chain.from_iterable(map(_tensors_of, node.all_input_nodes))
            is_apart = _is_of_torch(node) or storages.isdisjoint(storages_among(arguments))
            expect(is_apart, f"{node.target} changes nothing that it is given")
    return bool(writes)


def _is_of_torch(node: fx.Node) -> bool:
    """Whether a node calls a function of PyTorch or Python: no custom operator, and no operator with a graph inside."""
    target: Any = node.target
    if isinstance(target, str):
        return node.op == "call_method"
    if isinstance(target, (HigherOrderOperator, OpOverload, OpOverloadPacket)):
        return False
    owner, _, inner = str(getattr(target, "__module__", None)).partition(".")
    is_part = owner in ("torch", "_operator") and not inner.startswith("_dynamo")  # which may change arrays
    return target in _FUNCTIONS or is_part


def _on_the_cpu(value: Any) -> Any:
    """Return the CPU for a device or the name of one; return other values unchanged."""
    try:
        return torch.device("cpu") if isinstance(value, (str, torch.device)) and torch.device(value) else value
    except RuntimeError:  # a string that names no device
        return value


def _specialise(tracer: InstructionTranslatorBase, variable: VariableTracker, read: _Read) -> Any:
    """Return the value of a tensor while its code is traced, and guard the value; None if it can't be evaluated."""
    variable = realized(variable)
    if not isinstance(variable, TensorVariable):
        return None
    environment, result = tracer.output.shape_env, variable.as_proxy().node
    try:
        expect(all(map(_is_whole, _tensors_of(result))), "integers")
        needed = _nodes_behind(result)
        inputs = [node.meta["grapharg"] for node in result.graph.find_nodes(op="placeholder") if node in needed]
        computation = _Computation(result, needed)
        sources = [environment.var_to_sources[symbol][0] for symbol in computation.symbols]
        values = "backed_var_to_val" if hasattr(environment, "backed_var_to_val") else "var_to_val"  # deprecated
        size_values = getattr(environment, values)
        sizes = [int(size_values[symbol]) for symbol in computation.symbols]
        seen = read(computation.at(*sizes, *(argument.example for argument in inputs)))
    except Exception as error:  # any error of an operation: the graph breaks, as it does without this module
        log.debug("A tensor is not known while code is traced: %s", error)
        return None
    is_few = not computation.writes and sum(argument.example.numel() for argument in inputs) <= _MOST_NUMBERS
    if inputs and not ((isinstance(seen, bool) or is_few) and _is_admitted(tracer, seen)):
        return None
    note_unseen()  # a repeated module may read another value: its trace is not copied
    sources += [argument.source for argument in inputs]
    if sources:
        is_as_seen = functools.partial(_has_value, seen, computation, read)
        _guard(is_as_seen if inputs else functools.lru_cache(maxsize=_SIZES_KEPT)(is_as_seen), sources)
    return seen


def _is_admitted(tracer: InstructionTranslatorBase, seen: Any) -> bool:
    """Whether code may be captured with this outcome of a branch on input values; record the outcome if so.

    Code is captured for a few paths, and its graph breaks beyond these. A number may take any value: only its first one
    is admitted. A condition that depends on sizes alone is not counted: it is the same in each call of these sizes.
    """
    root, code = tracer.output.root_tx, tracer.f_code
    before, branch = _decided_by.get(root, ()), (code.co_filename, code.co_firstlineno, tracer.instruction_pointer)
    decisions, path = _decisions_in.setdefault(root.f_code, defaultdict(set)), (*before, branch)
    outcomes = decisions[path]
    if outcomes and repr(seen) not in outcomes:
        forks = sum(len(each) - 1 for each in decisions.values())
        if forks == _MOST_FORKS or not isinstance(seen, bool):
            return False
    outcomes.add(repr(seen))
    _decided_by[root] = (*before, (branch, repr(seen)))
    return True


def _has_value(seen: Any, computation: _Computation, read: _Read, *arguments: Any) -> bool:
    """Whether a tensor has the value `seen` at other sizes and inputs; False if it can't be evaluated there."""
    try:
        return bool(read(computation.at(*arguments)) == seen)
    except Exception as error:  # any error of an operation, for example under a trace
        log.debug("A tensor is not known at other sizes: %s", error)
        return False


# By captured code: the outcomes of each branch, keyed by the branch and all outcomes before it.
_decisions_in = weakref.WeakKeyDictionary[types.CodeType, defaultdict[tuple[Any, ...], set[str]]]()
_decided_by = weakref.WeakKeyDictionary[Any, tuple[Any, ...]]()  # by root tracer: its branches and outcomes


def _guard(is_as_seen: Callable[..., bool], sources: list[Any]) -> None:
    """Install a guard that calls a function with the values of `sources`: sizes, then inputs."""
    names = [source.name if isinstance(source.name, str) else source.name() for source in sources]
    line = f"___is_as_seen({', '.join(names)})"
    closure = {"___is_as_seen": is_as_seen}

    def add(builder: GuardBuilder, guard: Guard) -> None:
        builder.add_python_lambda_leaf_guard_to_root([line], [line], {**_get_closure_vars(), **closure})

    install_guard(GlobalStateSource().make_guard(add))


def _specialise_branch(handle: Callable[..., Any], tracer: InstructionTranslatorBase, instruction: Any) -> Any:
    """Replace the tensor on the stack by its truth value, if it can be evaluated, before a branching instruction."""
    seen = _specialise(tracer, tracer.stack[-1], bool)
    if seen is not None:
        tracer.stack[-1] = ConstantVariable.create(seen)
    return handle(tracer, instruction)


def _specialise_read(read: _Read, method: Any, variable: Any, tracer: Any, *arguments: Any, **named: Any) -> Any:
    """Return the value that a method (`item`, `tolist`) reads if it can be evaluated; otherwise trace the method."""
    seen = _specialise(tracer, variable, read)
    return method(variable, tracer, *arguments, **named) if seen is None else VariableTracker.build(tracer, seen)


@functools.cache
def _stand_ins() -> tuple[StandIn, ...]:
    tables: list[StandIn] = []
    ahead: list[type] = [InstructionTranslatorBase]
    while ahead:
        tracer: Any = ahead.pop()
        ahead += tracer.__subclasses__()
        table = list(tracer.dispatch_table)
        for name, code in dis.opmap.items():
            if _BRANCHES.fullmatch(name) and table[code] is not None:
                table[code] = around(table[code], _specialise_branch)
        tables.append((tracer, "dispatch_table", table))
    originals: dict[str, Any] = {"item": TensorVariable.method_item, "tolist": TensorVariable.method_tolist}
    reads = {name: functools.partial(_specialise_read, getattr(torch.Tensor, name)) for name in originals}
    readers = {name: around(method, reads[name]) for name, method in originals.items()}
    methods = getattr(TensorVariable, "tp_methods", None)
    if methods is None:  # PyTorch before 2.14 finds methods by their names
        return *tables, *((TensorVariable, f"method_{name}", reader) for name, reader in readers.items())
    entries = {name: dataclasses.replace(methods[name], handler=reader) for name, reader in readers.items()}
    return *tables, (TensorVariable, "tp_methods", {**methods, **entries})


def decided() -> AbstractContextManager[None]:
    """Evaluate branches and numbers in a `with` block; else graphs break there, and models are planned in pieces."""
    return replaced(*_stand_ins())
