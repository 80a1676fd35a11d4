"""From AOTAutograd's joint FX graph to our torch-free `Graph`, with the way back.

The joint graph holds forward and backward in one trace, functionalised: buffer updates are explicit copies at the end,
composite operators (layer norm, attention, convolution backward) stay whole, because no decomposition is asked for. A
`Captured` keeps the FX nodes beside the records made of them, by the same indices.

Three rewrites happen here. Backward nodes that don't depend on an incoming gradient (detaches of saved results) sink to
their first use: traced order would pin every such value from the start of the backward. And what random operations give
can come back, see `replays`: they hand on the state of the generator that they drew from, and get replay nodes.
At the end, results of the backward take the memory of gradients that die as they are made, see `overwriting`.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from . import torch_private
from .graph import Graph, Node, Phase, Storage, StorageKind, Tensor
from .overwriting import overwrite
from .replays import APPLY_MASK, DRAW_AGAIN, DRAW_MASK, add_state, can_draw_again, can_draw_mask, draw_mask_of

aten = torch.ops.aten

# Attention kernels carry the random tag even where no dropout is asked for; where the probability is found.
_DROPOUT_ARGUMENT = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": 3,
    "aten._scaled_dot_product_flash_attention.default": 3,
    "aten._scaled_dot_product_efficient_attention.default": 5,
    "aten._scaled_dot_product_cudnn_attention.default": 5,
    "aten._scaled_dot_product_fused_attention_overrideable.default": 4,
}
# Training-mode batch norm reads running statistics only to write the next ones: its output doesn't depend on them.
_IGNORES_WHAT_IT_UPDATES = {"aten._native_batch_norm_legit_functional.default"}
# Sums in an order that a GPU does not fix: a second run may differ in the last bit.
_ORDER_DEPENDENT_ON_GPU = re.compile(
    r"aten\.(scatter_add|index_add|index_put|scatter_reduce|_unsafe_index_put|put|histc|bincount|cumsum|nll_loss2d_forward)\b"
)
# Talk to other processes: run as often, and in the order, that these expect.
_COLLECTIVE = re.compile(r"(_c10d_functional|_c10d_functional_autograd|c10d)\.")
# What torch's own counter leaves out: the CPU's attention does the work of the GPU's.
_FLOP_FORMULAS = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}
_ROOT = re.compile(r"^L\[['\"].*?['\"]\]\.?")
_SUBSCRIPT = re.compile(r"(?:\._modules)?\[['\"](.*?)['\"]\]")
_SOURCE = re.compile(r'File "([^"]+)", line (\d+)')


@dataclass(frozen=True)
class Captured:
    """A captured part of the training step.

    Attributes:
        joint: The joint FX graph.
        graph: The records made of it.
        overwrites: For each FX node that overwrites a gradient, the position of that argument.
        allocating: The graph as it is where nothing is overwritten.
        fx_nodes: For each node of the graph, the FX node that it stands for.
        fx_values: For each tensor of the graph, the FX node whose value it is.
        forward_outputs: What the forward returns, by position: FX nodes or constants.
        backward_outputs: What the backward returns, by position: FX nodes or None.
        output_descriptions: AOTAutograd's descriptions of the forward's and of the backward's outputs.
        device: The device whose bytes are counted.
        mutated: Inputs of the graph that the step overwrites, as tensors of the graph.
    """

    joint: fx.GraphModule
    graph: Graph
    overwrites: Mapping[fx.Node, int]
    allocating: Graph
    fx_nodes: tuple[fx.Node, ...]
    fx_values: tuple[fx.Node, ...]
    forward_outputs: tuple[Any, ...]
    backward_outputs: tuple[Any, ...]
    output_descriptions: tuple[tuple[Any, ...], tuple[Any, ...]]
    device: torch.device
    mutated: frozenset[int]

    @property
    def placeholders(self) -> tuple[fx.Node, ...]:
        """The inputs of the forward, in order."""
        return tuple(n for n in self.joint.graph.find_nodes(op="placeholder") if not torch_private.is_tangent(n))

    @property
    def tangents(self) -> tuple[fx.Node, ...]:
        """The gradients of the outputs, in order."""
        return tuple(n for n in self.joint.graph.find_nodes(op="placeholder") if torch_private.is_tangent(n))


def capture(joint: fx.GraphModule, num_forward: int, parameters: frozenset[int] = frozenset()) -> Captured:
    """Make the records of a joint graph.

    Args:
        joint: The joint graph, dead code already removed.
        num_forward: Number of its outputs that the forward returns.
        parameters: Positions of the parameters among the inputs of the captured function.

    Returns:
        The records with the FX nodes that they stand for.
    """
    return _Builder(joint, num_forward, parameters).build()


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
    storage_of: dict[int, int] = field(default_factory=dict)  # identity of a fake storage -> index

    def build(self) -> Captured:
        outputs, gradients, *descriptions = torch_private.joint_outputs(self.joint, self.num_forward)
        self.device = _planned_device(self.joint)
        forward_set = _forward_nodes(self.joint, outputs)
        placeholders = list(self.joint.graph.find_nodes(op="placeholder"))
        inputs, tangents = self._add_inputs(placeholders)
        overwritten = self._overwritten_storages(torch_private.overwritten_inputs(placeholders, descriptions[0]))
        computations = _computations(self.joint)
        forward_fx = [n for n in computations if n in forward_set]
        backward_fx = _sink([n for n in computations if n not in forward_set], tangents)
        forward = [self._add_node(n, Phase.FORWARD, overwritten) for n in forward_fx]
        backward = [self._add_node(n, Phase.BACKWARD, overwritten) for n in backward_fx]
        for index in forward:
            self._add_replays(index)
        allocating = Graph(
            nodes=tuple(self.nodes),
            tensors=tuple(self.tensors),
            storages=tuple(self.storages),
            forward=tuple(forward),
            backward=tuple(backward),
            inputs=tuple(inputs),
            tangents=tuple(self.tensor_of[t] for t in tangents),
            outputs=self._tensors_of(outputs),
            gradients=self._tensors_of(gradients),
        )
        graph, overwrites = overwrite(allocating, self.fx_nodes, self.fx_values)
        return Captured(
            self.joint,
            graph,
            overwrites,
            allocating,
            tuple(self.fx_nodes),
            tuple(self.fx_values),
            tuple(outputs),
            tuple(gradients),
            (tuple(descriptions[0]), tuple(descriptions[1])),
            self.device,
            frozenset(t for t in inputs if self.tensors[t].storage in overwritten),
        )

    def _tensors_of(self, values: Iterable[Any]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.tensor_of[v] for v in values if isinstance(v, fx.Node)))

    def _add_inputs(self, placeholders: list[fx.Node]) -> tuple[list[int], list[fx.Node]]:
        inputs, tangents = [], []
        for node in placeholders:
            if torch_private.is_tangent(node):
                tangents.append(node)
                self._add_tensor(node, None, StorageKind.TANGENT)
            else:
                is_parameter = torch_private.input_position(node) in self.parameters
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
            shape = tuple(torch_private.int_hint(s) for s in value.shape)
            storage = self._storage(value, kind)
            self.tensors.append(Tensor(node.name, storage, shape, str(value.dtype).removeprefix("torch."), producer))
        else:
            self.tensors.append(Tensor(node.name, None, (), "", producer))
        self.fx_values.append(node)
        self.tensor_of[node] = index
        return index

    def _storage(self, value: torch.Tensor, kind: StorageKind) -> int | None:
        if value.layout is not torch.strided:
            return None
        identity = torch_private.storage_id(value)
        if identity not in self.storage_of:
            size = torch_private.int_hint(value.untyped_storage().nbytes()) if value.device == self.device else 0
            self.storage_of[identity] = len(self.storages)
            self.storages.append(Storage(allocated_bytes(size, self.device), kind))
        return self.storage_of[identity]

    def _overwritten_storages(self, after_forward: list[fx.Node]) -> frozenset[int]:
        """Find the resident storages that the step writes to, in the graph or after the forward."""
        written = list(after_forward)
        for node in _computations(self.joint):
            written.extend(a for a in _mutated_arguments(node) if a in self.tensor_of)
        storages = (self.tensors[self.tensor_of[n]].storage for n in written)
        return frozenset(s for s in storages if s is not None)

    def _add_node(self, node: fx.Node, phase: Phase, overwritten: frozenset[int]) -> int:
        index = len(self.nodes)
        kind = StorageKind.ACTIVATION if phase is Phase.FORWARD else StorageKind.GRADIENT
        read = [self.tensor_of[a] for a in node.all_input_nodes]
        outputs = [self._add_tensor(v, index, kind) for v in _values(node)]
        op = _name_of(node.target)
        reads_mutated = op not in _IGNORES_WHAT_IT_UPDATES and any(self.tensors[t].storage in overwritten for t in read)
        self.nodes.append(
            Node(
                name=node.name,
                op=op,
                phase=phase,
                inputs=tuple(dict.fromkeys(read)),
                outputs=tuple(outputs),
                key=work_key(node),
                is_random=_is_random(node, self.device),
                is_mutating=bool(_mutated_arguments(node)),
                reads_mutated=reads_mutated,
                flops=_flops(node),
                module=_module_path(node),
                source=_source(node),
            )
        )
        self.fx_nodes.append(node)
        return index

    def _add_replays(self, index: int) -> None:
        """Give a random node the nodes that bring its results back."""
        node, drawn = self.nodes[index], self.fx_nodes[index]
        values = {v.args[1]: self.tensor_of[v] for v in drawn.users if _is_part(v)}
        source = self.tensor_of.get(drawn.args[0]) if drawn.args and isinstance(drawn.args[0], fx.Node) else None
        is_dropout = drawn.target is aten.native_dropout.default and drawn.args[2] is not False
        if is_dropout and set(values) == {0, 1} and source is not None:
            self._add_replay(index, APPLY_MASK, (source, values[1]), (values[0],))
        if drawn.target is draw_mask_of:
            self._add_replay(index, DRAW_MASK, (self._add_state(index),), node.outputs)
        elif is_dropout and 1 in values and can_draw_mask(drawn, self._begins_allocation(source)):
            self._add_replay(index, DRAW_MASK, (self._add_state(index),), (values[1],))
        elif not is_dropout and node.is_random and not node.is_mutating and can_draw_again(drawn):
            self._add_replay(index, DRAW_AGAIN, (*node.inputs, self._add_state(index)), node.outputs)

    def _begins_allocation(self, tensor: int | None) -> bool:
        """Whether a tensor is the first in a block that the step allocates."""
        storage = None if tensor is None else self.tensors[tensor].storage
        if tensor is None or storage is None or self.storages[storage].kind.is_resident:
            return False
        return torch_private.int_hint(self.fx_values[tensor].meta["val"].storage_offset()) == 0

    def _add_state(self, index: int) -> int:
        """Let a random node hand on the state of its generator."""
        state = self._add_tensor(add_state(self.joint.graph, self.fx_nodes[index]), index, StorageKind.ACTIVATION)
        self.nodes[index] = replace(self.nodes[index], outputs=(*self.nodes[index].outputs, state))
        return state

    def _add_replay(self, index: int, op: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
        node = self.nodes[index]
        self.nodes.append(
            Node(
                name=f"{node.name}_replay",
                op=op,
                phase=Phase.FORWARD,
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


def allocated_bytes(size_bytes: int, device: torch.device) -> int:
    """Give the bytes that a device's allocator hands out for a request: CUDA's caching allocator rounds up to 512."""
    return -(-size_bytes // 512) * 512 if device.type == "cuda" else size_bytes


def _planned_device(joint: fx.GraphModule) -> torch.device:
    """Find the device that holds most of the inputs' bytes."""
    by_device: dict[torch.device, int] = {}
    for node in joint.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            size = torch_private.int_hint(value.untyped_storage().nbytes())
            by_device[value.device] = by_device.get(value.device, 0) + size
    return max(by_device, key=lambda d: by_device[d]) if by_device else torch.device("cpu")


def _is_part(node: fx.Node) -> bool:
    """Whether a node only picks one output of a computation with several."""
    source = node.args[0] if node.args else None
    return (
        node.target is operator.getitem
        and isinstance(source, fx.Node)
        and isinstance(source.meta.get("val"), (tuple, list))
    )


def _computations(joint: fx.GraphModule) -> list[fx.Node]:
    return [n for n in joint.graph.nodes if n.op in ("call_function", "call_method", "call_module") and not _is_part(n)]


def _values(node: fx.Node) -> list[fx.Node]:
    """List what a computation hands on: itself, or the parts that are used of a tuple."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return sorted((u for u in node.users if _is_part(u)), key=_position)
    return [] if value is None else [node]


def _position(part: fx.Node) -> int:
    position = part.args[1]
    assert isinstance(position, int)
    return position


def _source_of(node: fx.Node) -> fx.Node:
    """Give the computation whose value, or part of whose value, a node is."""
    source = node.args[0] if _is_part(node) else node
    assert isinstance(source, fx.Node)
    return source


def _mutated_arguments(node: fx.Node) -> list[fx.Node]:
    """List the arguments that an operator writes to, by its schema."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return []
    written: list[fx.Node] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            written.extend(v for v in torch_private.leaves(given) if isinstance(v, fx.Node))
    return written


def _forward_nodes(joint: fx.GraphModule, outputs: Sequence[Any]) -> set[fx.Node]:
    """Find what must run in the forward: what its outputs need, and what has effects that plain training has there."""
    tangent_dependent: set[fx.Node] = set()
    for node in joint.graph.nodes:
        if torch_private.is_tangent(node) or any(a in tangent_dependent for a in node.all_input_nodes):
            tangent_dependent.add(node)
    found: set[fx.Node] = set()
    stack = [n for n in outputs if isinstance(n, fx.Node)]
    for node in _computations(joint):
        has_effect = bool(_mutated_arguments(node)) or _is_random(node, None)
        if has_effect and node not in tangent_dependent and not torch_private.is_tagged_backward(node):
            stack.append(node)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def _sink(backward: list[fx.Node], tangents: Sequence[fx.Node]) -> list[fx.Node]:
    """Reorder the backward so that nodes independent of the incoming gradients run just before their first use.

    Nodes that depend on gradients, draw random numbers or write to something keep their order.
    """
    members = set(backward)
    dependent = set(tangents)
    for node in backward:
        if any(_source_of(a) in dependent for a in node.all_input_nodes):
            dependent.add(node)
    order: dict[fx.Node, None] = {}

    def place(root: fx.Node) -> None:
        stack = [root]
        while stack:
            node = stack[-1]
            sources = [_source_of(a) for a in node.all_input_nodes]
            missing = [s for s in sources if s in members and s not in order]
            if missing and node not in order:
                stack.extend(reversed(missing))
                continue
            order.setdefault(stack.pop())

    anchored = [n for n in backward if n in dependent or _mutated_arguments(n) or _is_random(n, None)]
    for node in (*anchored, *backward):
        place(node)
    return list(order)


def is_order_dependent_on_gpu(op: str) -> bool:
    """Whether an operator, by its qualified name, may differ in the last bit from run to run on a GPU."""
    return bool(_ORDER_DEPENDENT_ON_GPU.match(op))


def _is_random(node: fx.Node, device: torch.device | None) -> bool:
    """Whether a second run may give other numbers, or hang."""
    if isinstance(node.target, torch_private.HigherOrderOperator) or _COLLECTIVE.match(str(node.target)):
        return True
    if node.target is draw_mask_of:
        return True
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return device is not None and device.type == "cuda" and is_order_dependent_on_gpu(str(node.target))
    position = _DROPOUT_ARGUMENT.get(str(node.target))
    if position is None:
        return True
    probability = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return bool(probability != 0.0)


def work_key(node: fx.Node) -> str:
    """Describe the work of a node: operator, and for each argument shape, strides, dtype and device, or its value."""

    def describe(value: Any) -> str:
        if isinstance(value, fx.Node):
            return describe(value.meta.get("val"))
        if isinstance(value, torch.Tensor):
            shape = ",".join(str(torch_private.int_hint(s)) for s in value.shape)
            strides = ",".join(str(torch_private.int_hint(s)) for s in value.stride())
            return f"{value.dtype}[{shape}|{strides}]@{value.device.type}"
        if isinstance(value, (list, tuple)):
            return f"({' '.join(describe(v) for v in value)})"
        return repr(value)

    arguments = [describe(a) for a in node.args] + [f"{k}={describe(v)}" for k, v in sorted(node.kwargs.items())]
    return f"{_name_of(node.target)} {' '.join(arguments)}"


def _name_of(target: Any) -> str:
    """Name what a node calls, the same in every process."""
    return f"hiremate.{target.__name__}" if inspect.isfunction(target) else str(target)


def _flops(node: fx.Node) -> int:
    formula: Callable[..., int] | None = _FLOP_FORMULAS.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta.get("val"))
    try:
        return int(formula(*args, **kwargs, out_val=node.meta.get("val")))
    except Exception:  # a formula that doesn't know this call: the estimate goes by bytes alone
        return 0


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    return _SUBSCRIPT.sub(r".\1", _ROOT.sub("", path)).lstrip(".")


def _source(node: fx.Node) -> str:
    found = _SOURCE.findall(node.meta.get("stack_trace") or "")
    return ":".join(found[-1]) if found else ""
