"""Programs: a schedule of a captured graph as two straight-line FX modules, compiled to Python.

The generated code takes its arguments in a list, which it empties, and drops each value after its last use: there the
schedule has a `Free`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import fx

from ..capturing.absent import NOTHING_ABSENT, find_absent
from ..capturing.capture import Absence, Captured
from ..errors import ScheduleError
from ..records.graph import Direction, Node
from ..records.schedule import Compute, CopyIn, Copying, CopyOut, Free, Operation, Schedule, WaitOut
from ..rewriting.contributions import additions
from ..rewriting.kernels import as_eager, needs_traced_layout
from ..rewriting.nodes import is_collective, reshaped
from ..rewriting.overwriting import overwriting, result_strides
from ..rewriting.replays import DRAW_AGAIN, call_of, is_state, state_arguments
from ..rewriting.straight_line import compiled
from ..torch_private import aot, captured_code, tensor_state
from .copies import HostMemory, copy_in, pinned_storages, wait_in, wait_out
from .saved_values import SavedValues, saved_values

aten = torch.ops.aten


class Changes(NamedTuple):
    """Differences from the usual backward, which takes all tangents and returns each gradient by itself."""

    missing: frozenset[int] = frozenset()  # positions of outputs whose gradients (tangents) do not arrive
    # Positions of gradients that the backward adds to existing ones; it takes these as arguments after the tangents.
    added: frozenset[int] = frozenset()
    # Positions of gradients that the backward adds to sums of other runs; it takes these as arguments after `added`.
    carried: frozenset[int] = frozenset()
    uncast: frozenset[int] = frozenset()  # positions of gradients that it returns in half precision, before their cast
    in_new_memory: bool = False  # whether no result takes the memory of a value that dies


@dataclass(frozen=True)
class Program:
    """A schedule as code that runs a captured graph."""

    schedule: Schedule
    forward: aot.Boxed  # takes the inputs in a list, returns outputs followed by saved values
    backward: aot.Boxed  # takes saved values followed by tangents in a list, returns gradients
    forward_module: fx.GraphModule
    backward_module: fx.GraphModule
    # Positions of arguments that the backward never reads: pass None for them, or the code holds them to its end.
    unread: tuple[int, ...]
    saved: SavedValues
    variant: Callable[[Changes], Program]  # returns the program with another backward
    protects: bool = False  # whether the forward copies `saved.borrowed`


def build(captured: Captured, schedule: Schedule, host: HostMemory | None = None) -> Program:
    """Return the program of a valid schedule.

    Offloaded values go to `host`; by default the program has host memory of its own.

    Raises:
        ScheduleError: If the schedule offloads a value that must stay on the device.
    """
    _check(captured, schedule)
    saved = tuple(captured.fx_values[t] for t in schedule.saved)
    forward = _forward_module(captured, schedule, saved, host or HostMemory())
    run_forward, takes, facts = compiled(forward), _takes(captured, schedule), saved_values(captured, schedule)

    @functools.cache
    def variant(changes: Changes) -> Program:
        absence = find_absent(captured, changes.missing) if changes.missing else Absence(overwrites=captured.overwrites)
        absence = replace(absence, overwrites={} if changes.in_new_memory else {**absence.overwrites, **takes})
        backward = _backward_module(captured, schedule, saved, absence, changes)
        if changes.missing:
            backward.graph.eliminate_dead_code()
        return Program(
            schedule=schedule,
            forward=run_forward,
            backward=compiled(backward),
            forward_module=forward,
            backward_module=backward,
            unread=tuple(p for p, value in enumerate(backward.graph.find_nodes(op="placeholder")) if not value.users),
            saved=facts,
            variant=variant,
        )

    return variant(Changes())


def _check(captured: Captured, schedule: Schedule) -> None:
    """Raise for a schedule that moves or repeats a collective, or offloads a value that must stay on the device.

    Other ranks, which may have other plans, wait for the collectives in the order of the graph.
    """
    nodes = captured.graph.nodes
    computed = (o.node for o in (*schedule.forward, *schedule.backward) if isinstance(o, Compute))
    in_graph = (*captured.graph.forward, *captured.graph.backward)
    planned, expected = ([n for n in order if is_collective(nodes[n].op)] for order in (computed, in_graph))
    assert planned == expected, "a plan moves or repeats a collective"
    offloaded = {operation.storage for operation in schedule.forward if isinstance(operation, CopyOut)}
    stays = offloaded & pinned_storages(captured) if offloaded else ()
    if stays:
        names = ", ".join(t.name for t in captured.graph.tensors if t.storage in stays)
        raise ScheduleError(f"A plan offloads what must stay on the device: {names}. Pass pinned_storages(captured)")


def _takes(captured: Captured, schedule: Schedule) -> dict[fx.Node, int]:
    """Return the nodes that may write their result over an argument, with its position: nothing reads it later."""
    positions, read = dict[fx.Node, int](), set[int | None]()
    for operation in reversed(schedule.backward):
        if not isinstance(operation, Compute):
            continue
        record = captured.graph.nodes[operation.node]
        if record.takes is not None and captured.graph.tensors[record.takes].storage not in read:
            node, taken = captured.fx_nodes[operation.node], captured.fx_values[record.takes]
            positions[node] = next(position for position, a in enumerate(node.args) if a is taken)
        read.update(captured.graph.tensors[t].storage for t in record.inputs)
    return positions


def _forward_module(
    captured: Captured, schedule: Schedule, saved: Sequence[fx.Node], host: HostMemory
) -> fx.GraphModule:
    emitter = _Emitter(captured, host=host)
    values, graph = emitter.values, emitter.graph
    emitter.take(captured.placeholders)
    emitter.emit(schedule.forward, schedule.saved)
    outputs = [values[v] if isinstance(v, fx.Node) else v for v in captured.forward_outputs]
    graph.output((*outputs, *(values[v] for v in saved)))
    for state in [node for node in graph.nodes if is_state(node) and not node.users]:  # no recomputation draws from it
        graph.erase_node(state)
    return captured_code.module_of(captured.joint, graph, "PlannedForward")


def _backward_module(
    captured: Captured,
    schedule: Schedule,
    saved: Sequence[fx.Node],
    absence: Absence,
    changes: Changes,
) -> fx.GraphModule:
    gradients = captured.backward_outputs
    halves = {gradients[p]: gradients[p].args[0] for p in changes.uncast - changes.carried}
    absence = replace(absence, replaced={**absence.replaced, **halves})
    emitter = _Emitter(captured, absence)
    graph = emitter.graph
    emitter.take((*saved, *captured.tangents))
    totals = {p: _placeholder(graph, f"total_{p}", gradients[p]) for p in sorted(changes.added)}
    sums = [_Sum(captured, p, graph, is_cast=p not in changes.uncast) for p in sorted(changes.carried)]
    emitter.emit(schedule.backward, schedule.saved, sums)
    there = (v if isinstance(v, fx.Node) and v not in absence.values else None for v in gradients)
    results = [None if v is None else emitter.values[v] for v in there]
    for position, total in totals.items():
        gradient = results[position]
        if gradient is not None:  # added as soon as it is computed, so that the generated code frees it there
            with graph.inserting_after(total if gradient.op == "placeholder" else gradient):
                graph.call_function(aten.add_.Tensor, (total, gradient))
        results[position] = None
    for carried in sums:
        results[carried.position] = carried.finish(results[carried.position])
    graph.output(tuple(results))
    return captured_code.module_of(captured.joint, graph, "PlannedBackward")


def _placeholder(graph: fx.Graph, name: str, shown: fx.Node) -> fx.Node:
    """Append an input with the traced value of a captured node; return its node."""
    added = graph.placeholder(name)
    added.meta = {"val": shown.meta.get("val")}
    return added


class _Sum:
    """A gradient sum that this backward continues, one term at a time, as autograd does in eager PyTorch."""

    def __init__(self, captured: Captured, position: int, graph: fx.Graph, is_cast: bool) -> None:
        self.position = position  # position of the input whose gradient it is
        # The terms, by the captured node that adds or casts them; empty for a single term without a cast.
        self.terms: dict[fx.Node, list[fx.Node]] = {}
        gradient, count = captured.backward_outputs[position], captured.terms.get(position, 1)
        self._cast: fx.Node | None = None  # the cast that follows the last term
        if position in captured.cast_terms:
            self._cast = gradient if is_cast else None
            cast, gradient, count = gradient, gradient.args[0], captured.cast_terms[position]
            self.terms[cast] = [gradient] if count == 1 else []
        for term, adding in additions(gradient, count) if count > 1 else ():
            self.terms.setdefault(adding, []).append(term)
        self._graph, self._total = graph, _placeholder(graph, f"carried_{position}", gradient)

    def add(self, terms: Sequence[fx.Node], node: fx.Node | None = None) -> fx.Node:
        """Add terms in place of a captured node; return the node's value: the sum, after its cast if the node casts."""
        for term in terms:
            self._total = self._graph.call_function(aten.add_.Tensor, (self._total, term))
        return self._in_full() if node is self._cast else self._total

    def _in_full(self) -> fx.Node:
        if self._cast is not None:
            kwargs, self._cast = dict(self._cast.kwargs), None
            self._total = self._graph.call_function(aten._to_copy.default, (self._total,), kwargs)
        return self._total

    def finish(self, gradient: fx.Node | None) -> fx.Node:
        """Return the sum with all terms. `gradient` is the single term, if there is just one; else it is ignored."""
        if gradient is not None and not self.terms:
            self.add([gradient])
        return self._in_full()


class _Emitter:
    """Makes the graph of one half of a schedule.

    `values` maps a captured value to its node in the new graph; while the value is offloaded, that is a `Parked`.
    """

    def __init__(self, captured: Captured, absence: Absence = NOTHING_ABSENT, host: HostMemory | None = None) -> None:
        self.graph = fx.Graph()
        self.values: dict[fx.Node, fx.Node] = {}
        self._captured, self._absence, self._host = captured, absence, host
        self._on_the_way: dict[int, fx.Node] = {}
        self._adding: dict[fx.Node, _Sum] = {}
        self._returned = {*captured.forward_outputs, *captured.backward_outputs}

    def take(self, values: Iterable[fx.Node]) -> None:
        """Append captured values as inputs."""
        for value in values:
            self.values[value] = _placeholder(self.graph, value.name, value)

    def emit(self, operations: Sequence[Operation], saved: Sequence[int], sums: Sequence[_Sum] = ()) -> None:
        """Append the operations of a schedule half; `saved` are the schedule's tensors, `sums` the sums to continue."""
        self._adding = {node: carried for carried in sums for node in carried.terms}
        for node in self._captured.joint.graph.find_nodes(op="get_attr"):
            if node not in self.values:
                self.values[node] = self.graph.node_copy(node)
        for operation in operations:
            if isinstance(operation, Compute):
                if operation.node < len(self._captured.fx_nodes):
                    self._run(operation.node)
            elif not isinstance(operation, Free):  # generated code frees values after their last use
                self._move(operation, saved)

    def _move(self, operation: Copying, tensors: Sequence[int]) -> None:
        """Append a copy to the host or back, or the wait for one."""
        storage, call = operation.storage, self.graph.call_function
        saved = self._values_on(storage, tensors)
        if isinstance(operation, CopyOut):
            assert self._host is not None, "values are offloaded in the forward"
            all_values = self._values_on(storage, range(len(self._captured.fx_values)))
            there = next(value for value in all_values if value in self.values)
            self._on_the_way[storage] = call(self._host.copy_out, (self.values[there],))
        elif isinstance(operation, WaitOut):
            parked = call(wait_out, (self._on_the_way.pop(storage), *(self.values[v] for v in saved)))
            parked.meta["val"] = tuple(value.meta["val"] for value in saved)  # marks it as a node with parts
            for position, value in enumerate(saved):
                self.values[value] = call(operator.getitem, (parked, position))
        elif isinstance(operation, CopyIn):
            self._on_the_way[storage] = call(copy_in, (self.values[saved[0]],))
        else:
            arriving = self._on_the_way.pop(storage)
            for value in saved:
                self.values[value] = call(wait_in, (self.values[value], arriving))
                self.values[value].meta = {"val": value.meta["val"]}

    def _values_on(self, storage: int, tensors: Iterable[int]) -> list[fx.Node]:
        graph = self._captured.graph
        return [self._captured.fx_values[t] for t in tensors if graph.tensors[t].storage == storage]

    def _run(self, index: int) -> None:
        record, node = self._captured.graph.nodes[index], self._captured.fx_nodes[index]
        if record.replays is not None:
            self._replay(record, node)
        elif node in self._adding:
            carried = self._adding[node]  # a sum that continues with the terms that exist
            existing = [self.values[term] for term in carried.terms[node] if term not in self._absence.values]
            self.values[node] = carried.add(existing, node)
        elif node in self._absence.values:
            pass  # a missing gradient
        elif node in self._absence.replaced:
            self.values[node] = self.values[self._absence.replaced[node]]
        else:
            self._compute(record, node)

    def _replay(self, record: Node, node: fx.Node) -> None:
        """Append the replay operation that recomputes the results of a captured node."""
        function, args, kwargs = call_of(record.op, node, [self._captured.fx_values[t] for t in record.inputs])
        args, kwargs = fx.node.map_arg((args, kwargs), self._value_of)
        copy = self.graph.call_function(function, args, kwargs)
        copy.meta |= {"direction": record.direction, "key": record.key}
        outputs = self._outputs(record, node)
        if record.op == DRAW_AGAIN:
            self._hand_on(node, copy, outputs)
        else:
            self.values[outputs[0]] = copy
        self._finish(node, outputs, copy)

    def _compute(self, record: Node, node: fx.Node) -> None:
        """Append a captured node, with the kernel of eager PyTorch."""
        needs_layout = record.direction is Direction.BACKWARD and needs_traced_layout(node.target)
        value_of = self._laid_out if needs_layout else self._value_of
        target, args = as_eager(node)
        args, kwargs = fx.node.map_arg((args, dict(node.kwargs)), value_of)
        if node.target is aten.view.default and record.direction is Direction.BACKWARD:
            target = aten.reshape.default  # gradients may have other strides than they were traced with
        if node.target is aten._unsafe_view.default and node not in self._returned:
            target = aten.view.default  # the same result in a third of the time
        if node in self._absence.overwrites:
            dying = self._absence.overwrites[node]
            target, args = overwriting(node.target, dying), (result_strides(node, dying), *args)
        if self._absence.values and record.direction is Direction.BACKWARD and (read := reshaped(node)) is not None:
            # A missing term makes a sum its other term, whose strides may let eager PyTorch return a view.
            target, args = aten.reshape.default, (self._value_of(read), node.args[1])
        outputs = self._outputs(record, node)
        for state in filter(is_state, outputs):
            self.values[state] = copied = self.graph.node_copy(state)
            copied.args = state_arguments(state, node, self._value_of)
        copy = self.graph.create_node(node.op, target, args, kwargs, node.name, node.type)
        copy.meta = {**node.meta, "direction": record.direction, "key": record.key}
        self._hand_on(node, copy, [v for v in outputs if not is_state(v)])
        self._finish(node, outputs, copy)

    def _value_of(self, value: fx.Node) -> fx.Node:
        """Return the node of a value: zeros for a missing gradient."""
        if value not in self._absence.values:
            return self.values[value]
        shown: torch.Tensor = value.meta["val"]
        size = tuple(tensor_state.int_hint(s) for s in shown.shape)
        return self.graph.call_function(torch.zeros, (size,), {"dtype": shown.dtype, "device": shown.device})

    def _laid_out(self, value: fx.Node) -> fx.Node:
        """Return a value with the strides that it was traced with."""
        shown = value.meta.get("val")
        if not isinstance(shown, torch.Tensor):
            return self._value_of(value)
        strides = tuple(tensor_state.int_hint(s) for s in shown.stride())
        return self.graph.call_function(tensor_state.with_strides, (self._value_of(value), strides))

    def _outputs(self, record: Node, node: fx.Node) -> list[fx.Node]:
        """List the results of an operation, the unfinished one for a result that other operations finish."""
        finish = self._captured.finishes.get(node)
        made = (self._captured.fx_values[t] for t in record.outputs)
        return [finish.value if finish is not None and value is finish.result else value for value in made]

    def _hand_on(self, node: fx.Node, copy: fx.Node, outputs: Sequence[fx.Node]) -> None:
        """Map captured results to the copy of their node, or to the copy's parts."""
        for value in outputs:
            if value is node:
                self.values[value] = copy
            else:
                part = self.graph.call_function(operator.getitem, (copy, value.args[1]))
                part.meta = value.meta
                self.values[value] = part

    def _finish(self, node: fx.Node, outputs: Sequence[fx.Node], made: fx.Node) -> None:
        """Append the operations that finish a result of a node, if that result is among `outputs`."""
        finish = self._captured.finishes.get(node)
        if finish is None or finish.value not in outputs:
            return
        for step, target, args in finish.calls():
            args, kwargs = fx.node.map_arg((args, dict(step.kwargs)), self.values.__getitem__)
            self.values[step] = copy = self.graph.call_function(target, args, kwargs)
            copy.meta = {**step.meta, "direction": made.meta["direction"], "finishes": made.meta["key"]}
