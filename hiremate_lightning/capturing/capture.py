"""Convert AOTAutograd's joint FX graph to the torch-free `Graph`, and keep the FX node of each record.

The joint graph is functionalised: buffer updates are explicit copies at the end, and composite operators stay whole. A
`Captured` holds the FX nodes under the same indices as the records made of them.

Backward nodes that don't depend on an incoming gradient (detaches of saved results) move to just before their first
use: in traced order their values would be alive from the start of the backward. Random operations get replay nodes, see
`replays`. An elementwise forward operation that works in place on a result joins the node that made the result, and a
backward node writes its result into a gradient that nothing reads later, see `overwriting`.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

from ..memory.allocator import allocated_bytes
from ..records.costs import Profile
from ..records.expressions import Sizes
from ..records.graph import Direction, Graph, Node, Storage, StorageKind, Tensor
from ..rewriting import nodes, replays
from ..rewriting.overwriting import Finish, find_finishes, overwrite
from ..torch_private import aot, inductor, readings, tensor_state

aten = torch.ops.aten

# Batch norm in training mode reads running statistics only to update them: its output doesn't depend on them.
_IGNORES_WHAT_IT_UPDATES = {"aten._native_batch_norm_legit_functional.default"}
# PyTorch's FLOP counter has no formula for attention on the CPU: it does the work of flash attention on the GPU.
_FLOP_FORMULAS = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}
_SAVED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)  # selective checkpointing saves these outputs
_ROOT = re.compile(r"^L\[['\"].*?['\"]\](?:\.__self__)?\.?")  # a module, or the one whose method is called
_SUBSCRIPT = re.compile(r"(?:\._modules)?\[['\"](.*?)['\"]\]")
_SOURCE = re.compile(r'File "([^"]+)", line (\d+)')


class MadeFrom(Protocol):
    """Traces of a few sizes, from which captured code is made at sizes never traced (`code_at_sizes.CodeAtSizes`)."""

    samples: tuple[Captured, ...]  # the code as captured at a few sizes
    sizes: tuple[Sizes, ...]  # the sizes of each sample
    programs: dict[Any, Any]

    def at(self, sizes: Sizes) -> tuple[Captured, Profile]:
        """Return the code and its costs at the given sizes."""

    def without(self, missing: frozenset[int], sizes: Sizes) -> tuple[Graph, Profile]:
        """Return the graph and costs at the given sizes without nodes that only missing gradients need."""


@dataclass(frozen=True)
class Absence:
    """The parts of a backward that do not run because gradients of outputs are missing."""

    values: frozenset[fx.Node] = frozenset()  # values that are not computed
    replaced: Mapping[fx.Node, fx.Node] = field(default_factory=dict)  # sum with an absent term -> its present term
    overwrites: Mapping[fx.Node, int] = field(default_factory=dict)  # `Captured.overwrites` of this backward
    graph: Graph | None = None  # the graph with sums replaced by their present terms; None if nothing is absent


@dataclass(frozen=True)
class Captured:
    """One captured graph with its joint graph and records."""

    joint: fx.GraphModule
    graph: Graph  # the records of the joint graph
    overwrites: Mapping[fx.Node, int]  # FX node that overwrites a gradient -> position of the overwritten argument
    allocating: Graph  # the same records if nothing is overwritten: each node allocates its results
    fx_nodes: tuple[fx.Node, ...]  # for each node of the graph, its FX node
    finishes: Mapping[fx.Node, Finish]  # FX node -> operations that change its result in place as part of that node
    fx_values: tuple[fx.Node, ...]  # for each tensor of the graph, the FX node that has its value
    forward_outputs: tuple[Any, ...]  # outputs of the forward, by position: FX nodes or constants
    backward_outputs: tuple[Any, ...]  # outputs of the backward, by position: FX nodes or None
    device: torch.device  # the planned device: only its bytes are counted
    mutated: frozenset[int]  # inputs of the graph that the step overwrites, as tensors of the graph
    overwritten: frozenset[int] = frozenset()  # storages that uncaptured code overwrites between forward and backward
    # Number of terms of a leaf's gradient, by position of the input, if there are several terms and their sum has no
    # other reader.
    terms: Mapping[int, int] = field(default_factory=dict)
    # Number of terms of a gradient in half precision that is cast to a parameter's gradient, even if there is one term,
    # by position of the parameter, if eager PyTorch casts that parameter once for all calls in a block of autocast.
    cast_terms: Mapping[int, int] = field(default_factory=dict)
    finished: tuple[int, ...] = ()  # inputs with gradients, in the order in which eager autograd completes these
    made_from: MadeFrom | None = None  # the traces if this was computed from them: only `graph` has the new sizes then
    sizes: Sizes = ()  # the new sizes if this was computed from traces of other sizes
    # Cache of `absent.find_absent`: positions of the outputs without gradient -> absent parts of the backward.
    absences: dict[frozenset[int], Absence] = field(default_factory=dict, init=False, compare=False, repr=False)

    def reading_once(self, storages: Collection[int]) -> Captured:
        """Return a copy whose readers of these storages never run twice, since uncaptured code overwrites them."""
        graph, allocating = self.graph.reading_once(storages), self.allocating.reading_once(storages)
        return replace(self, graph=graph, allocating=allocating, overwritten=self.overwritten.union(storages))

    def running_once(self, random: Collection[int], reading: Collection[int]) -> Captured:
        """Return a copy in which these nodes of the graph never run twice, see `Graph.running_once`."""
        graph, allocating = self.graph.running_once(random, reading), self.allocating.running_once(random, reading)
        return replace(self, graph=graph, allocating=allocating)

    @functools.cached_property
    def tensor_of(self) -> dict[fx.Node, int]:
        """The tensor of the graph for each FX node that has its value."""
        return {value: tensor for tensor, value in enumerate(self.fx_values)}

    @functools.cached_property
    def trained(self) -> tuple[int, ...]:
        """Positions of the inputs with gradients."""
        pairs = zip(self.placeholders, self.backward_outputs, strict=False)
        return tuple(position for position, (_, gradient) in enumerate(pairs) if gradient is not None)

    @functools.cached_property
    def gradient_dtypes(self) -> dict[int, torch.dtype]:
        """Dtypes, by input position, of the gradients that are dense and have the shape and device of their inputs."""
        inputs, gradients = self.placeholders, self.backward_outputs
        shown = ((p, inputs[p].meta.get("val"), gradients[p].meta.get("val")) for p in self.trained)
        tensors = ((p, pair) for p, *pair in shown if all(isinstance(value, torch.Tensor) for value in pair))
        return {position: pair[1].dtype for position, pair in tensors if tensor_state.are_alike(*pair)}

    @functools.cached_property
    def placeholders(self) -> tuple[fx.Node, ...]:
        """The inputs of the forward, in order."""
        return tuple(n for n in self.joint.graph.find_nodes(op="placeholder") if not aot.is_tangent(n))

    @functools.cached_property
    def tangents(self) -> tuple[fx.Node, ...]:
        """The gradients of the outputs, in order."""
        return tuple(n for n in self.joint.graph.find_nodes(op="placeholder") if aot.is_tangent(n))


def capture(joint: fx.GraphModule, num_forward: int, parameters: frozenset[int] = frozenset()) -> Captured:
    """Make the records of a joint graph without dead code, and keep the FX node of each record.

    The first `num_forward` outputs are the forward's; `parameters` are positions among the inputs of the forward.
    """
    return _Builder(joint, num_forward, parameters).build()


def order_of_gradients(joint: fx.GraphModule, num_forward: int) -> tuple[int, ...]:
    """List the positions of the inputs with gradients, in the order in which eager autograd completes the gradients.

    The joint graph must be as traced, before any pass: its backward nodes are in the order of eager PyTorch.
    """
    gradients: list[Any] = aot.joint_outputs(joint, num_forward)[1]
    place: dict[Any, int] = {node: index for index, node in enumerate(joint.graph.nodes)}
    inputs = joint.graph.find_nodes(op="placeholder")
    first_reads = [min((place[user] for user in node.users), default=0) for node in inputs]
    positions = [position for position, gradient in enumerate(gradients) if isinstance(gradient, fx.Node)]
    return tuple(sorted(positions, key=lambda at: (place[gradients[at]], -first_reads[at])))


@dataclass
class _Builder:
    """Collects records while it walks the joint graph once."""

    joint: fx.GraphModule
    num_forward: int
    parameters: frozenset[int]
    nodes: list[Node] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    fx_nodes: list[fx.Node] = field(default_factory=list)
    fx_values: list[fx.Node] = field(default_factory=list)
    tensor_of: dict[fx.Node, int] = field(default_factory=dict)
    finishes: dict[fx.Node, Finish] = field(default_factory=dict)
    storage_of: dict[int, int] = field(default_factory=dict)  # identity of a fake storage -> index of its record
    checkpoints: dict[int, int] = field(default_factory=dict)  # number of a checkpoint call -> index of its first node

    def build(self) -> Captured:
        outputs, gradients, *_ = aot.joint_outputs(self.joint, self.num_forward)
        self.device = nodes.planned_device(self.joint)
        inputs, tangents = self._add_inputs()
        written = (self.tensor_of[value] for value in nodes.written_values(self.joint) if value in self.tensor_of)
        overwritten = frozenset(s for t in written if (s := self.tensors[t].storage) is not None)
        forward_fx, backward_fx = nodes.halves(self.joint, outputs)
        resident = [v for v in self.tensor_of if self.tensors[self.tensor_of[v]].storage in overwritten]
        self.finishes = find_finishes(forward_fx, outputs, resident)
        finishing = {step for finish in self.finishes.values() for step in finish.steps}
        forward = [self._add_node(n, Direction.FORWARD, overwritten) for n in forward_fx if n not in finishing]
        backward = [self._add_node(n, Direction.BACKWARD, overwritten) for n in backward_fx]
        for index in forward:
            self._add_replays(index)
        self._group_by_function(backward)
        allocating = Graph(
            nodes=tuple(self.nodes),
            tensors=tuple(self.tensors),
            storages=tuple(self.storages),
            forward=tuple(forward),
            backward=tuple(backward),
            inputs=tuple(inputs),
            tangents=tuple(tangents),
            outputs=self._tensors_of(outputs),
            gradients=self._tensors_of(gradients),
        )
        graph, overwrites, taken = overwrite(allocating, self.fx_nodes, self.fx_values)
        return Captured(
            joint=self.joint,
            graph=graph.taking(taken),
            overwrites=overwrites,
            allocating=allocating.taking(taken),
            fx_nodes=tuple(self.fx_nodes),
            finishes=self.finishes,
            fx_values=tuple(self.fx_values),
            forward_outputs=tuple(outputs),
            backward_outputs=tuple(gradients),
            device=self.device,
            mutated=frozenset(t for t in inputs if self.tensors[t].storage in overwritten),
        )

    def _tensors_of(self, values: Iterable[Any]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.tensor_of[v] for v in values if isinstance(v, fx.Node)))

    def _add_inputs(self) -> tuple[list[int], list[int]]:
        inputs, tangents = list[int](), list[int]()
        for node in self.joint.graph.find_nodes(op="placeholder"):
            if aot.is_tangent(node):
                tangents.append(self._add_tensor(node, None, StorageKind.TANGENT))
            else:
                is_parameter = aot.input_position(node) in self.parameters
                kind = StorageKind.PARAMETER if is_parameter else StorageKind.INPUT
                inputs.append(self._add_tensor(node, None, kind))
        inputs.extend(self._add_tensor(n, None, StorageKind.INPUT) for n in self.joint.graph.find_nodes(op="get_attr"))
        return inputs, tangents

    def _add_tensor(self, node: fx.Node, producer: int | None, kind: StorageKind) -> int:
        value = node.meta.get("val")
        if node.op == "get_attr" and value is None:
            value = getattr(self.joint, str(node.target), None)
        index = len(self.tensors)
        if isinstance(value, torch.Tensor):
            shape = tuple(tensor_state.int_hint(s) for s in value.shape)
            storage = self._storage(value, kind, _eager_times(node))
            self.tensors.append(Tensor(node.name, storage, shape, str(value.dtype).removeprefix("torch."), producer))
        else:
            self.tensors.append(Tensor(node.name, None, (), "", producer))
        self.fx_values.append(node)
        self.tensor_of[node] = index
        return index

    def _storage(self, value: torch.Tensor, kind: StorageKind, eager_times: int) -> int | None:
        if value.layout is torch.sparse_coo:
            *_, value = tensor_state.dense_parts(value)  # the storage of its values counts, not that of its indices
        if value.layout is not torch.strided:
            return None
        identity = tensor_state.storage_id(value)
        if identity not in self.storage_of:
            size = tensor_state.int_hint(value.untyped_storage().nbytes()) if value.device == self.device else 0
            self.storage_of[identity] = len(self.storages)
            self.storages.append(Storage(allocated_bytes(size, self.device), kind, eager_times))
        return self.storage_of[identity]

    def _set_size(self, tensor: int, size_bytes: int) -> None:
        storage = self.tensors[tensor].storage
        if storage is not None:
            self.storages[storage] = replace(self.storages[storage], size_bytes=size_bytes)

    def _add_node(self, node: fx.Node, direction: Direction, overwritten: frozenset[int]) -> int:
        index = len(self.nodes)
        kind = StorageKind.ACTIVATION if direction is Direction.FORWARD else StorageKind.GRADIENT
        finish = self.finishes.get(node)
        members = (node,) if finish is None else (node, *finish.steps)
        read = [self.tensor_of[a] for a in (*node.all_input_nodes, *(finish.reads if finish else ()))]
        outputs = []
        for value in nodes.values_of(node):  # readers of a finished value read its result instead
            is_finished = finish is not None and value is finish.value
            self.tensor_of[value] = self._add_tensor(finish.result if finish and is_finished else value, index, kind)
            outputs.append(self.tensor_of[value])
        if node.target in nodes.COPIES_STORAGE:
            storages = (self.tensors[tensor].storage for tensor in (outputs[0], read[0]))
            sizes = [self.storages[storage].size_bytes for storage in storages if storage is not None]
            self._set_size(outputs[0], max(sizes, default=0))
        if (size_bytes := nodes.sparse_bytes(node)) is not None:
            self._set_size(outputs[0], allocated_bytes(size_bytes, self.device))
        op, operation = nodes.name_of(node.target), nodes.operation_named(node.target)
        number = aot.checkpoint_of(node) if direction is Direction.FORWARD else None
        reads_mutated = op not in _IGNORES_WHAT_IT_UPDATES and any(self.tensors[t].storage in overwritten for t in read)
        self.nodes.append(
            Node(
                name=node.name,
                op=op,
                direction=direction,
                inputs=tuple(dict.fromkeys(read)),
                outputs=tuple(outputs),
                key=", then ".join(map(work_key, members)),
                is_random=nodes.is_random(node, self.device),
                is_mutating=bool(nodes.mutated_arguments(node)),
                reads_mutated=reads_mutated,
                flops=_flops(node),
                module=_module_path(node),
                source=_line_in(node.meta.get("stack_trace") or ""),
                eager_bytes=operation.eager_bytes(node),
                eager_inputs=tuple(self.tensor_of[v] for v in operation.eager_reads(node)),
                checkpoint=None if number is None else self.checkpoints.setdefault(number, index),
                is_saved=node.meta.get("recompute") in _SAVED,
                compiled=inductor.function_of(node),
            )
        )
        self.fx_nodes.append(node)
        return index

    def _group_by_function(self, backward: Iterable[int]) -> None:
        """Set `Node.function` of backward nodes. Sums of gradients have a number in the trace, but no function."""
        functions = defaultdict[int, list[int]](list)
        for index in backward:
            node = self.fx_nodes[index]
            if node.meta.get("autograd_backward") and "seq_nr" in node.meta and node.target is not aten.add.Tensor:
                functions[node.meta["seq_nr"]].append(index)
        for members in functions.values():
            if len(members) > 1:
                for index in members:
                    self.nodes[index] = replace(self.nodes[index], function=members[0])

    def _add_replays(self, index: int) -> None:
        """Add the replay nodes that recompute the results of a random node or a batch norm."""
        node, drawn = self.nodes[index], self.fx_nodes[index]
        values = {v.args[1]: self.tensor_of[v] for v in drawn.users if nodes.is_part(v)}
        source = self.tensor_of.get(drawn.args[0]) if drawn.args and isinstance(drawn.args[0], fx.Node) else None
        storage = None if source is None else self.tensors[source].storage
        is_allocated = storage is not None and not self.storages[storage].kind.is_resident
        is_dropout = drawn.target is aten.native_dropout.default and drawn.args[2] is not False
        if is_dropout and set(values) == {0, 1} and source is not None:
            self._add_replay(index, replays.APPLY_MASK, (source, values[1]), (values[0],))
        if is_dropout and 1 in values and replays.can_draw_mask(drawn, is_allocated):
            self._add_replay(index, replays.DRAW_MASK, (self._add_state(index),), (values[1],))
        elif not is_dropout and node.is_random and not node.is_mutating and replays.can_draw_again(drawn):
            self._add_replay(index, replays.DRAW_AGAIN, (*node.inputs, self._add_state(index)), node.outputs)
        elif {0, 1, 2} <= values.keys() and replays.can_normalize(drawn):
            read = [self.tensor_of[a] for a in drawn.args[:3] if isinstance(a, fx.Node)]
            self._add_replay(index, replays.NORMALIZE, (*read, values[1], values[2]), (values[0],))

    def _add_state(self, index: int) -> int:
        """Add the generator's state to the outputs of a random node; return its tensor."""
        made = replays.add_state(self.joint.graph, self.fx_nodes[index])
        state = self._add_tensor(made, index, StorageKind.ACTIVATION)
        self.nodes[index] = replace(self.nodes[index], outputs=(*self.nodes[index].outputs, state))
        return state

    def _add_replay(self, index: int, op: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
        node, finish = self.nodes[index], self.finishes.get(self.fx_nodes[index])
        if finish is not None and self.tensor_of[finish.result] in outputs:
            inputs = tuple(dict.fromkeys((*inputs, *(self.tensor_of[v] for v in finish.reads))))
        self.nodes.append(
            Node(
                name=f"{node.name}_replay",
                op=op,
                direction=Direction.FORWARD,
                inputs=inputs,
                outputs=outputs,
                key=f"{op} {node.key}",
                reads_mutated=node.reads_mutated,
                module=node.module,
                source=node.source,
                replays=index,
            )
        )
        self.fx_nodes.append(self.fx_nodes[index])


def work_key(node: fx.Node) -> str:
    """Describe the work of a node: the operator, and each argument's shape, strides, dtype and device, or its value."""
    subgraphs = nodes.subgraphs_of(node)

    def describe(value: Any) -> str:
        if isinstance(value, fx.Node) and value in subgraphs:
            inner = (module.code for module in subgraphs[value].modules() if isinstance(module, fx.GraphModule))
            return f"graph {hashlib.sha256(''.join(inner).encode()).hexdigest()[:16]}"
        if isinstance(value, fx.Node):
            return describe(value.meta.get("val"))
        if isinstance(value, torch.Tensor):
            sizes = (",".join(str(tensor_state.int_hint(s)) for s in each) for each in (value.shape, value.stride()))
            views = f"{' conjugated' * value.is_conj()}{' negated' * value.is_neg()}"
            return f"{value.dtype}[{'|'.join(sizes)}]@{value.device.type}{views}"
        if isinstance(value, (list, tuple)):
            return f"({' '.join(describe(v) for v in value)})"
        if isinstance(value, dict):
            return f"({' '.join(f'{k}={describe(v)}' for k, v in value.items())})"
        return repr(value)

    arguments = [describe(a) for a in node.args] + [f"{k}={describe(v)}" for k, v in sorted(node.kwargs.items())]
    return f"{nodes.name_of(node.target)} {' '.join(arguments)}"


def _flops(node: fx.Node) -> int:
    formula: Callable[..., int] | None = _FLOP_FORMULAS.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta.get("val"))
    try:
        return int(formula(*args, **kwargs, out_val=node.meta.get("val")))
    except Exception:  # the formula does not handle this call: time is then estimated from bytes alone
        return 0


def _eager_times(value: fx.Node) -> int:
    """Return the factor by which a value is larger in eager PyTorch."""
    if not nodes.is_part(value):
        return 1
    maker, position = cast("tuple[fx.Node, int]", value.args[:2])
    return nodes.operation_named(maker.target).eager_times(maker, position)


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    return _SUBSCRIPT.sub(r".\1", _ROOT.sub("", path)).lstrip(".")


@functools.lru_cache(maxsize=4096)
def _line_in(stack_trace: str) -> str:
    """Return the innermost line of the user's code in a stack trace, as FILE:LINE; "" if it has none."""
    places = _SOURCE.findall(stack_trace)
    return next((f"{file}:{line}" for file, line in reversed(places) if not readings.is_of_tools(file)), "")
