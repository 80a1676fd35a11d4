"""Fuse elementwise operations and reductions of a joint graph into kernels, before planning.

A group of operations between matrix products and convolutions becomes one node, whose kernel Inductor compiles. All
later stages treat the node as any other operator: they profile, save or recompute, simulate and run it. A kernel that
runs again gives the same bits, so recomputation changes no number.

The boundaries of groups decide which values a plan can save. A forward value is internal if no forward node outside of
its group reads it. So each group has one result; internal values take no memory and can't be saved. A backward kernel
that reads an internal value computes it again from the group's inputs and the results of its reductions. Backward nodes
are never recomputed: a backward operation joins the group of its only reader if no product lies between, so that fusion
keeps no more values alive at once.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from ..torch_private import aot, tensor_state
from . import nodes
from .decomposing import decompose
from .joint import Joint
from .kernels import FusedKernels

aten = torch.ops.aten

MOST_MEMBERS = 64  # most operations in a group; larger groups take long to compile
_SMALL = 4  # a result is small if an input has at least this many times as many elements

# Operators without the pointwise tag whose result elements each depend on few input elements.
_ELEMENTWISE = {
    getattr(aten, name).default
    for name in (
        "_to_copy",
        "cat",
        "constant_pad_nd",
        "elu",
        "elu_backward",
        "hardswish",
        "hardswish_backward",
        "hardtanh_backward",
        "leaky_relu_backward",
        "mish",
        "mish_backward",
        "select_backward",
        "slice_backward",
        "softplus_backward",
    )
}
_REDUCTIONS = {aten.sum.dim_IntList, aten.mean.dim, aten.var_mean.correction, aten.var.correction}
_REDUCTIONS |= {
    getattr(aten, name).default
    for name in (
        "sum",
        "mean",
        "amax",
        "amin",
        "native_layer_norm",
        "native_layer_norm_backward",
        "native_batch_norm_backward",
        "native_group_norm_backward",
        "_softmax",
        "_softmax_backward_data",
        "_log_softmax",
        "_log_softmax_backward_data",
    )
}
_FLOATS = {torch.float32, torch.float64, torch.bfloat16, torch.float16}
_DTYPES = _FLOATS | {torch.bool, torch.uint8, torch.int32, torch.int64}


def fuse(joint: Joint) -> None:
    """Replace groups of nodes by fused kernels in a graph without dead code, if there is a cache for kernels."""
    if joint.kernels is None:
        return
    statistics = decompose(joint.graph)
    outputs, *_ = aot.joint_outputs(joint.module, joint.forward_outputs)
    joint.module.graph = _Fuser(joint.module, outputs, joint.kernels).run(statistics)


@dataclass(eq=False)
class _Kernel:
    """A group of operations that becomes one kernel, in order; `is_written` if its node is in the new graph."""

    members: list[fx.Node]
    is_written: bool = False


class _Fuser:
    """Forms groups of nodes, and builds the graph in which each group is one node."""

    def __init__(self, joint: fx.GraphModule, outputs: Sequence[Any], kernels: FusedKernels) -> None:
        self.joint = joint
        self.kernels = kernels
        self.device = nodes.planned_device(joint)
        self.overwritten = nodes.written_storages(joint)
        self.transparent = set(filter(self._is_transparent, joint.graph.nodes))
        halves = nodes.halves(joint, outputs)
        self.forward, self.backward = ([n for n in half if n not in self.transparent] for half in halves)
        self.is_forward = set(self.forward)
        # For each value, the gradients of outputs (tangents) on which it depends.
        self.tangents_of = {n: frozenset([n]) for n in joint.graph.find_nodes(op="placeholder") if aot.is_tangent(n)}
        for node in joint.graph.nodes:
            if node not in self.tangents_of:
                self.tangents_of[node] = frozenset().union(*(self.tangents_of[a] for a in node.all_input_nodes))
        self.fusible = {n for n in (*self.forward, *self.backward) if self._is_fusible(n)}
        self.group_of: dict[fx.Node, _Kernel] = {}
        self.derived: set[fx.Node] = set()  # internal forward values that backward kernels compute again
        self.position = {n: i for i, n in enumerate((*self.forward, *self.backward))}
        # For each node, the number of its stretch: fusible nodes of one half up to the next other node.
        self.stretch: dict[fx.Node, int] = {}
        for half in (self.forward, self.backward):
            self.stretch.update(zip(half, accumulate(n not in self.fusible for n in half), strict=True))
        self.graph = fx.Graph()
        self.values: dict[fx.Node, fx.Node] = {}  # old node -> node of the new graph

    def run(self, statistics: Sequence[list[fx.Node]]) -> fx.Graph:
        for members in statistics:
            self.group_of.update(dict.fromkeys(members, _Kernel(members)))
        for node in reversed(self.forward):
            if node in self.fusible and node not in self.group_of:
                self._place_forward(node)
        for node in reversed(self.backward):
            if node in self.fusible:
                self._place_backward(node)
        for operation, group in list(self.group_of.items()):  # unfuse lone operations that read no derived value
            reads = (self.origin(a) for a in operation.all_input_nodes)
            if len(group.members) == 1 and not any(a in self.derived for a in reads):
                del self.group_of[operation]
        return self._write()

    # ---------------------------------------------------------------- what may be fused

    def _is_fusible(self, node: fx.Node) -> bool:
        if not isinstance(node.target, aot.OpOverload) or node.op != "call_function":
            return False
        if not (_is_elementwise(node) or node.target in _REDUCTIONS):
            return False
        if nodes.mutated_arguments(node) or nodes.is_random(node, self.device) or not node.all_input_nodes:
            return False
        if self._reads_overwritten(node):
            return False  # must run before the overwrite
        if len({self.tangents_of[a] for a in node.all_input_nodes} - {frozenset()}) > 1:
            return False  # if one of the gradients never arrives, this node is dropped or reads zeros
        tensors = [t for n in (node, *node.all_input_nodes) for t in tensor_state.leaves(n.meta.get("val"))]
        return all(
            isinstance(t, torch.Tensor)
            and t.layout is torch.strided
            and t.dtype in _DTYPES
            and t.device == self.device
            and t.numel() > 0
            and not tensor_state.is_symbolic(t)
            for t in tensors
            if t is not None
        )

    def _reads_overwritten(self, node: fx.Node) -> bool:
        read = tensor_state.storages_among(a.meta.get("val") for a in node.all_input_nodes)
        return not read.isdisjoint(self.overwritten)

    def _is_transparent(self, node: fx.Node) -> bool:
        """Whether a node is a part, a view, or a cast to a wider type, which each reader repeats at no cost."""
        if nodes.is_part(node) or nodes.is_view(node.target):
            return True
        if node.target is not aten._to_copy.default or set(node.kwargs) != {"dtype"} or self._reads_overwritten(node):
            return False
        before, after = nodes.source_of(node).meta["val"], node.meta["val"]
        is_wider: bool = after.dtype.itemsize > before.dtype.itemsize
        return is_wider and before.dtype in _FLOATS

    def origin(self, node: fx.Node) -> fx.Node:
        """Return the operation or input that a value was made from through views and widening casts."""
        while node in self.transparent:
            node = nodes.source_of(node)
        return node

    def consumers(self, value: fx.Node) -> set[fx.Node]:
        """Return the nodes that read a value, directly or through views of it; they may include the output node."""
        readers: set[fx.Node] = set()
        stack = list(value.users)
        while stack:
            user = stack.pop()
            if user in self.transparent:
                stack.extend(user.users)
            else:
                readers.add(user)
        return readers

    # ---------------------------------------------------------------- forward

    def _place_forward(self, node: fx.Node) -> None:
        """Add a forward operation to the group of all its readers, or start a new group with it."""
        readers = {c for c in self.consumers(node) if c in self.is_forward or c.op == "output"}
        groups = {self.group_of.get(c) for c in readers}
        group = groups.pop() if len(groups) == 1 else None
        can_join = group is not None and len(group.members) < MOST_MEMBERS and self._may_wait(node, group)
        if group is None or not can_join or not all(self._can_be_internal(node, v) for v in nodes.values_of(node)):
            self.group_of[node] = _Kernel([node])
            return
        group.members.insert(0, node)
        self.group_of[node] = group
        if _is_elementwise(node) and self._is_wanted(node):
            self.derived.add(node)

    def _can_be_internal(self, node: fx.Node, value: fx.Node) -> bool:
        """Whether a value can be internal to a group, or be a further small result of the group."""
        if not self._is_wanted(value):
            return True
        if not _is_elementwise(node):
            return self._is_small(node, value)
        # `kept` lists the large values that the backward would read only to compute this value again.
        computed = [a for a in map(self.origin, node.all_input_nodes) if a.op not in ("placeholder", "get_attr")]
        kept = [a for a in computed if _numel(a) >= _numel(node) and not self._is_wanted(a)]
        backward = [c for c in self.consumers(value) if c not in self.is_forward]
        return all(c in self.fusible for c in backward) and len(kept) <= 1

    def _is_wanted(self, value: fx.Node) -> bool:
        """Whether a backward kernel reads a value or computes another value from it."""
        return any(c not in self.is_forward or c in self.derived for c in self.consumers(value))

    def _may_wait(self, node: fx.Node, group: _Kernel) -> bool:
        """Whether running an operation as late as its group keeps no more bytes alive until then."""
        if self.stretch[node] == self.stretch[group.members[-1]]:
            return True
        computed = [a for a in map(self.origin, node.all_input_nodes) if a.op not in ("placeholder", "get_attr")]
        read = tensor_state.leaves([a.meta["val"] for a in computed])
        waiting = sum(t.nbytes for t in read if _SMALL * t.numel() >= _numel(node))
        return bool(waiting <= sum(t.nbytes for t in tensor_state.leaves(node.meta["val"]) if t is not None))

    # ---------------------------------------------------------------- backward

    def _place_backward(self, node: fx.Node) -> None:
        """Add a backward operation to the groups that read its large results, merged, or start a new group with it."""
        group = _Kernel([node])
        readers = {c for v in nodes.values_of(node) if not self._is_small(node, v) for c in self.consumers(v)}
        joined = {self.group_of.get(c) for c in readers}
        inner = {g for g in joined if g is None or not self._gives_gradients_only(g.members[-1])}
        near = {self.stretch.get(c) for c in readers} == {self.stretch[node]}
        tangents = self.tangents_of[node]
        near = near and (not tangents or all(self.tangents_of[c] == tangents for c in readers))
        if near and len(inner) <= 1 and None not in inner:
            members = {node, *(m for g in joined if g is not None for m in g.members)}
            read = {self.origin(a) for member in members for a in member.all_input_nodes} - members
            # If all inputs of the members exist before the first member runs, no other node lies between the members.
            is_ready = all(self.position.get(a, -1) < self.position[node] for a in read)
            if len(members) <= MOST_MEMBERS and is_ready:
                group.members = sorted(members, key=self.position.__getitem__)
        self.group_of.update(dict.fromkeys(group.members, group))

    def _is_small(self, node: fx.Node, value: fx.Node) -> bool:
        size: int = value.meta["val"].numel()
        return _SMALL * size <= max(_numel(a) for a in node.all_input_nodes)

    def _gives_gradients_only(self, last: fx.Node) -> bool:
        """Whether a group that ends with this node only gives small gradients of parameters, which no node reads."""
        values = nodes.values_of(last)
        return all(self._is_small(last, v) and {c.op for c in self.consumers(v)} == {"output"} for v in values)

    # ---------------------------------------------------------------- the new graph

    def _write(self) -> fx.Graph:
        """Build the graph: forward, then backward, each group as one node, views just before their first reader."""
        old = self.joint.graph
        for node in old.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.values[node] = self.graph.node_copy(node)
        for node in (*self.forward, *self.backward):
            group = self.group_of.get(node)
            if group is None:
                self._value(node)
            elif node is group.members[-1]:
                self._write_group(group)
        output = old.output_node()
        self.graph.output(fx.node.map_arg(output.args[0], self._value)).meta = output.meta
        return self.graph

    def _value(self, node: fx.Node) -> fx.Node:
        if node not in self.values:
            group = self.group_of.get(nodes.operation_of(node))
            if group is None:
                self.values[node] = self.graph.node_copy(node, self._value)
            else:
                self._write_group(group)
        return self.values[node]

    def _write_group(self, group: _Kernel) -> None:
        if group.is_written:
            return
        group.is_written = True
        inner = [v for member in group.members for v in nodes.values_of(member) if v not in self.derived]
        # Results are values that other groups read, or need to compute derived values.
        inside = set(group.members) - self.derived
        results = [value for value in inner if not self.consumers(value) <= inside]
        module, inputs = self._body(group.members, results)
        shown = [v.meta["val"] for v in results]
        kernel = self.kernels.get(module, shown)
        node = self.graph.call_function(kernel, tuple(map(self._value, inputs)))
        node.meta = {**nodes.origin_of(group.members[-1]), "val": shown[0] if len(shown) == 1 else shown}
        for position, value in enumerate(results):
            if len(results) == 1:
                self.values[value] = node
            else:
                part = self.values[value] = self.graph.call_function(operator.getitem, (node, position))
                part.meta = {**node.meta, "val": shown[position]}

    def _body(self, members: Sequence[fx.Node], results: Sequence[fx.Node]) -> tuple[fx.GraphModule, list[fx.Node]]:
        """Return a module of a group's operations, with the views and derived values they read, and its inputs."""
        computed = self.derived.union(members)
        graph, values, inputs = fx.Graph(), dict[fx.Node, fx.Node](), list[fx.Node]()

        def is_computed_here(node: fx.Node) -> bool:
            while node in self.transparent and node.target is not aten._to_copy.default:
                node = nodes.source_of(node)
            return node in self.transparent or node in computed

        def value_of(node: fx.Node) -> fx.Node:
            if node not in values and is_computed_here(node):
                values[node] = graph.node_copy(node, value_of)
            elif node not in values:
                values[node] = graph.placeholder(f"input_{len(inputs)}")
                values[node].meta = {"val": node.meta["val"]}
                inputs.append(node)
            return values[node]

        for member in members:
            value_of(member)
        graph.output([value_of(value) for value in results])
        graph.eliminate_dead_code()
        return fx.GraphModule(torch.nn.Module(), graph), inputs


def _is_elementwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in _ELEMENTWISE


def _numel(node: fx.Node) -> int:
    return max((t.numel() for t in tensor_state.leaves(node.meta.get("val")) if t is not None), default=0)
