"""Compare calls of modules that Dynamo traces, list the nodes that a call added to the graph, and copy them.

Calls are compared by arguments and circumstances, modules by what Dynamo read of them: see `likeness`.
"""

from __future__ import annotations

import functools
import operator
import re
import traceback
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._C._dynamo.guards import GlobalStateGuard
from torch._dynamo.guards import uninteresting_files
from torch._dynamo.source import FloatTensorSource, NumpyTensorSource
from torch._dynamo.utils import get_fake_value, set_example_value
from torch._dynamo.variables import ConstantVariable, TupleVariable
from torch._dynamo.variables.builder import VariableBuilder, wrap_fx_proxy
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._guards import Source
from torch._ops import HigherOrderOperator

from ..facts import VALUES, expect, facts_of, is_plain
from ..tensor_state import map_leaves
from .likeness import Likeness, Read, equal

FEWEST_NODES = 4  # of a trace: a smaller one is traced as fast as it is compared
_KNOWN_OF_NODES = frozenset(  # a node with other metadata is not copied
    ("example_value", "stack_trace", "nn_module_stack", "source_fn_stack", "creation_timestamp")
)
_WITH_MORE_INSIDE = HigherOrderOperator, types.MethodType, functools.partial
_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\[(['\"])([^'\"\]]+)\1\]")


class TracedCall:
    """A call of a module that Dynamo is about to trace, and what its trace depends on beside module and arguments.

    The calling line is not compared: code that asks for its caller is not traced.

    Attributes:
        module: Dynamo's variable of the module, which has a source.
        lines: The calling line and its callers, as in the stack traces of nodes.
        blocks: The `with` blocks that are open in all these frames.
        modes: Torch's global state: grad mode, autocast, determinism.

    Raises:
        NotShownError: The call depends on more than is compared.
    """

    def __init__(self, module: Any, tx: Any, arguments: list[Any], named: dict[str, Any]) -> None:
        expect(tx.output.current_tracer.parent is None, "in a function of its own")
        expect(torch._C._functorch.peek_interpreter_stack() is None, "within torch.func")
        modes = tx.symbolic_torch_function_state
        expect(modes.torch_function_subclass_enabled and not modes.mode_stack, "a mode of torch functions")
        expect(not torch.is_inference_mode_enabled() and not tx.output.export, "not in training")
        expect(not len(tx.exn_vt_stack), "while an error is handled")
        frames = [tx]
        while (caller := getattr(frames[-1], "parent", None)) is not None:
            frames.append(caller)
        self.module, self.tx, self.arguments, self.named = module, tx, tuple(arguments), dict(named)
        self.lines = [frame.frame_summary() for frame in frames[::-1] if not frame.is_co_filename_from_nn_modules()]
        self.blocks = [entry.with_context for frame in frames for entry in frame.block_stack if entry.with_context]
        self.modes = GlobalStateGuard()

    def stack_text(self) -> str:
        """Return the text that begins the `stack_trace` of each node of this call."""
        shown = [line for line in self.lines if line.filename not in uninteresting_files()]
        return "".join(traceback.StackSummary.from_list(shown).format())


def realized(variable: Any) -> Any:
    """Return the variable that a lazy variable stands for, other variables as they are."""
    while isinstance(variable, LazyVariableTracker):
        variable = variable.realize()
    return variable


def is_constant(variable: Any) -> bool:
    """Whether a variable is a plain constant."""
    return type(variable) is ConstantVariable and isinstance(variable.value, VALUES)


def values_in(result: Any) -> Iterator[Any]:
    """Yield the variables that a module returned, alone or in tuples that the traced code made."""
    result = realized(result)
    if type(result) is TupleVariable and result.source is None:
        for item in result.items:
            yield from values_in(item)
    else:
        yield result


@dataclass(eq=False)
class Trace:
    """A traced call of a module, with the nodes and inputs that it added to Dynamo's graph, in order."""

    call: TracedCall
    result: Any
    nodes: list[fx.Node]
    inputs: list[fx.Node]
    changes_before: int  # number of side effects before this call
    aliases: Sequence[tuple[Source, Source]]  # (second source, first source) of values reached twice so far

    def __post_init__(self) -> None:
        self.depth = len(self.call.tx.nn_module_stack)
        values = [value for value in values_in(self.result) if type(value) is TensorVariable]
        self.returned = frozenset(value.as_proxy().node for value in values)

    @functools.cached_property
    def read(self) -> Read:
        """What Dynamo read of the module; computed when another call is first compared with this one."""
        return Read(self.call.tx.output, self.call.module.source, self.aliases)


class Copy:
    """Copies of a trace's nodes for another call.

    Raises:
        NotShownError: The calls are not shown to be alike; nothing was added to the graph.
    """

    def __init__(self, trace: Trace, call: TracedCall) -> None:
        self._trace, self._tx, self._output = trace, call.tx, call.tx.output
        self._copy_of: dict[fx.Node, fx.Node] = {}  # from the trace's nodes to this call's: first the arguments
        self._original_of: dict[fx.Node, fx.Node] = {}
        self._variables: dict[fx.Node, Any] = {}  # Dynamo's variables of this call's arguments and results
        one, calls = trace.call, (trace.call, call)
        is_same = len(one.blocks) == len(call.blocks) and all(map(operator.is_, one.blocks, call.blocks))
        expect(is_same and one.modes.check(), "other modes")
        expect(len(one.arguments) == len(call.arguments) and [*one.named] == [*call.named], "other arguments")
        for pair in zip(*((*each.arguments, *each.named.values()) for each in calls), strict=True):
            self._compare(*pair)
        is_new_or_given = all(node in self._copy_of or node.op != "placeholder" for node in trace.returned)
        expect(is_new_or_given, "a result that is a parameter")
        self._likeness = Likeness(self._output, trace.read, call.module.source)
        self._inputs = self._sources_of_inputs()
        # Names of modules as in `nn_module_stack`.
        self._names = [_MEMBER.sub(r".\2", each.module.get_nn_module_stack_source().name) for each in calls]
        self._lines = [each.stack_text() for each in calls]

    def _compare(self, one: Any, other: Any) -> None:
        """Compare an argument of the traced call with this call's argument at the same place."""
        if isinstance(one, LazyVariableTracker) and not one.is_realized():
            expect(one.source is not None and one.source == other.source, "an argument that is not read")
            return
        one, other = realized(one), realized(other)
        expect(type(one) is type(other), "an argument of another kind")
        if type(one) is TupleVariable:
            expect(len(one.items) == len(other.items), "an argument of another length")
            for pair in zip(one.items, other.items, strict=True):
                self._compare(*pair)
        elif type(one) is TensorVariable:
            facts = [facts_of(variable.proxy.node.meta["example_value"]) for variable in (one, other)]
            expect(facts[0] == facts[1], "a tensor of another kind")
            expect(one.source == other.source, "a tensor that comes from elsewhere")
            changed = self._output.side_effects.has_pending_mutation
            expect(not any(map(changed, (one, other))), "a tensor with attributes")
            self._pair(one, other)
        elif type(one) is SymNodeVariable:
            expect(str(one.sym_num) == str(other.sym_num), "a number that varies")
            self._pair(one, other)
        else:
            expect(is_constant(one) and equal(one.value, other.value), "an argument")

    def _pair(self, one: Any, other: Any) -> None:
        node, other_node = one.as_proxy().node, other.as_proxy().node
        pair = self._copy_of.setdefault(node, other_node), self._original_of.setdefault(other_node, node)
        expect(pair == (other_node, node), "an argument that is another one too")
        self._variables[node] = other

    def _sources_of_inputs(self) -> dict[fx.Node, Source | None]:
        """Return the inputs that the nodes read, in order, each with its source in the other module; None if shared."""
        trace, sources = self._trace, dict[fx.Node, Source | None]()
        available, read = {*trace.nodes, *self._copy_of}, trace.read
        used = (use for node in trace.nodes for use in node.all_input_nodes)
        for node in dict.fromkeys((*trace.inputs, *used)):
            if node in available:
                continue
            expect(node.op == "placeholder", "a value from outside")
            source = node.meta["grapharg"].source if "grapharg" in node.meta else None
            if source is None or not read.has(source):
                sources[node] = None
                continue
            value = node.meta["example_value"]
            is_static = isinstance(value, torch.Tensor) and not value._has_symbolic_sizes_strides
            is_itself = source in read.tensors and not isinstance(source, (FloatTensorSource, NumpyTensorSource))
            expect(is_static and is_itself, "an input of the module that varies")
            sources[node] = other = self._likeness.other_of(source)
            self._likeness.value_of(other)
        return sources

    def make(self) -> Any:
        """Add inputs, guards and nodes to the graph; return the call's result. A failure leaves some of them there."""
        for node, source in self._inputs.items():
            self._copy_of[node] = node
            if source is not None:
                count = len(self._output.placeholders)
                variable = VariableBuilder(self._tx, source)(self._likeness.value_of(source))
                self._copy_of[node] = added = variable.as_proxy().node
                if len(self._output.placeholders) > count and "nn_module_stack" in node.meta:
                    added.meta["nn_module_stack"] = self._stack(node)
        for guard in self._likeness.guards:
            self._output.guards.add(guard, collect_debug_stack=False)
        self._output.guard_on_key_order.update(map(self._likeness.other_of, self._trace.read.in_order))
        for node in self._trace.nodes:
            self._copy_of[node] = self._node(node)
        return self._result(self._trace.result)

    def _node(self, node: fx.Node) -> fx.Node:
        """Add a copy of a node, with the metadata that a trace would give it."""
        tracer = self._output.current_tracer
        arguments, named = fx.map_arg((node.args, node.kwargs), self._copy_of.__getitem__)
        added: fx.Node = tracer.create_node(node.op, node.target, arguments, named, type_expr=node.type)
        not_copied = ("example_value", "creation_timestamp")
        added.meta.update({key: value for key, value in node.meta.items() if key not in not_copied})
        if "nn_module_stack" in node.meta:
            added.meta["nn_module_stack"] = self._stack(node)
        if "stack_trace" in node.meta:
            one, other = self._lines
            expect(node.meta["stack_trace"].startswith(one), "a line that is called from elsewhere")
            added.meta["stack_trace"] = other + node.meta["stack_trace"].removeprefix(one)
        if "source_fn_stack" in node.meta:
            *outer, (_, target) = node.meta["source_fn_stack"]
            added.meta["source_fn_stack"] = [*outer, (added.name, target)]
        if node in self._trace.returned:
            self._variables[node] = wrap_fx_proxy(self._tx, fx.Proxy(added, tracer))
        else:
            set_example_value(added, get_fake_value(added, self._tx))
        expect(_facts(added.meta["example_value"]) == _facts(node.meta["example_value"]), f"{added.name} is another")
        return added

    def _stack(self, node: fx.Node) -> dict[str, Any]:
        """Return the `nn_module_stack` of a node's copy, keyed by names of modules."""
        one, other = self._names
        stack = dict(self._tx.nn_module_stack)
        for name, kind in list(node.meta["nn_module_stack"].values())[self._trace.depth :]:
            rest = name.removeprefix(one)
            renamed = other + rest if name.startswith(one) and not rest[:1].isalnum() else name
            stack[renamed] = renamed, kind
        return stack

    def _result(self, variable: Any) -> Any:
        variable = realized(variable)
        if type(variable) is TupleVariable:
            return TupleVariable([self._result(item) for item in variable.items])
        if is_constant(variable):
            return ConstantVariable.create(variable.value)
        return self._variables[variable.as_proxy().node]


def _facts(value: Any) -> Any:
    """Return what code can ask of a node's value, in the containers of the value."""
    return map_leaves(lambda each: facts_of(each) if isinstance(each, torch.Tensor) else (type(each), str(each)), value)


def nodes_after(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that were added to the graph after `node`, without the inputs."""
    nodes: list[fx.Node] = []
    while (node := node.next).op != "root":
        if node.op != "placeholder":  # inputs follow `node` if the graph had no operation yet
            nodes.append(node)
    return nodes


def can_be_copied(nodes: list[fx.Node], result: Any) -> bool:
    """Whether all nodes and results of a call can be copied, and the nodes are enough to save time."""
    values = values_in(result)
    is_of_values = all(type(v) is TensorVariable or (is_constant(v) and v.source is None) for v in values)
    return is_of_values and len(nodes) >= FEWEST_NODES and all(map(_is_operation, nodes))


def _is_operation(node: fx.Node) -> bool:
    """Whether a node is an operation with no graph inside, and with nodes and constants as arguments."""
    is_called = node.op in ("call_function", "call_method") and not isinstance(node.target, _WITH_MORE_INSIDE)
    is_of_values = "example_value" in node.meta and _KNOWN_OF_NODES.issuperset(node.meta)
    arguments: list[Any] = []
    fx.node.map_aggregate((node.args, node.kwargs), arguments.append)
    return is_called and is_of_values and all(isinstance(value, fx.Node) or is_plain(value) for value in arguments)


def note_unseen() -> None:
    """Record that traced code depends on more than is compared: the modules that contain it are not copied."""
    unseen.count += 1


unseen = types.SimpleNamespace(count=0)  # how often code read an object's identity, or ran untraced code
