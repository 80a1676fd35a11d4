"""In-place computation: an operation writes its result into a value that dies there, by the kernel of eager.

`overwrite` finds gradients that operations of the backward may overwrite: only memory that the backward itself has
allocated, that no later operation reads through any tensor on it, and that no code but PyTorch's own has seen. And it
finds values of the forward whose memory a gradient may take, such as logits that of their loss. `find_finishes` finds
operations of the forward that finish what another one made, as `relu_` does. No plan is lost: to keep the value takes
as much memory as to keep the result.

Gradients may arrive with other strides than traced, and others may hold what the forward returned. So each overwriting
operation looks before it writes, and else allocates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from .. import thresholds
from ..records.graph import Graph, StorageKind
from ..torch_private import aot, tensor_state
from ..torch_private.operators import schema_call
from . import nodes

aten = torch.ops.aten


def _in_place(change: Any) -> Callable[..., torch.Tensor]:
    """Wrap an operator that changes its first argument, so that it is given this argument as `out` too."""

    def into(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = change(*args, **kwargs)
        return result

    return into


# Operators that read of each tensor only the element that they are about to write, with the overload that writes into a
# given tensor and the name under which it takes that. Each runs the kernel of the operator itself. Left out are those
# whose overload only copies a new result (`hardswish_backward`), or rounds otherwise (`mul_.Scalar`).
_INTO: dict[Any, tuple[Any, str]] = {
    aten.add.Tensor: (torch.add, "out"),
    aten.sub.Tensor: (torch.sub, "out"),
    aten.mul.Tensor: (torch.mul, "out"),
    aten.mul.Scalar: (torch.mul, "out"),
    aten.div.Tensor: (torch.div, "out"),
    aten.div.Scalar: (torch.div, "out"),
    aten.neg.default: (torch.neg, "out"),
    aten.where.self: (torch.where, "out"),
    aten.exp.default: (torch.exp, "out"),
    aten.leaky_relu.default: (aten.leaky_relu.out, "out"),
    aten.relu.default: (_in_place(torch.relu_), "out"),
    aten.rsqrt.default: (torch.rsqrt, "out"),
    aten.sigmoid.default: (torch.sigmoid, "out"),
    aten.sqrt.default: (torch.sqrt, "out"),
    aten.tanh.default: (torch.tanh, "out"),
}
_NAMES = ("elu", "gelu", "hardsigmoid", "hardtanh", "leaky_relu", "sigmoid", "silu", "softplus", "tanh", "threshold")
for _name in _NAMES:
    _backward = getattr(aten, f"{_name}_backward")
    _INTO[_backward.default] = (_backward.grad_input, "grad_input")

# These read a row of their first argument before they write the row, and take what they write to for contiguous.
_INTO_FIRST_BY_ROWS: dict[Any, tuple[Any, str]] = {
    aten._log_softmax_backward_data.default: (aten._log_softmax_backward_data.out, "out"),
    aten._softmax_backward_data.default: (aten._softmax_backward_data.out, "grad_input"),
    aten._log_softmax.default: (aten._log_softmax.out, "out"),
    aten._softmax.default: (aten._softmax.out, "out"),
}
# Of these only the first argument may be overwritten, and how the others lie in memory doesn't matter: numbers are put
# into a copy of it, or added there.
_INTO_FIRST: dict[Any, tuple[Any, str]] = {
    aten.index_add.default: (aten.index_add.out, "out"),
    aten.index_put.default: (_in_place(aten.index_put_.default), "out"),
    aten.masked_fill.Scalar: (_in_place(aten.masked_fill_.Scalar), "out"),
    aten.scatter_add.default: (aten.scatter_add.out, "out"),
    **_INTO_FIRST_BY_ROWS,
}

# Of complex numbers these round by whether they write over what they read: PyTorch leaves the choice of instructions to
# the compiler, which lets them look. Products don't where all tensors lie alike.
_COMPLEX_PRODUCTS = (aten.div.Tensor, aten.sigmoid_backward.default, aten.tanh_backward.default)

Strides = tuple[tuple[int, tuple[int, ...]], ...]


def candidates_of(node: fx.Node, unsettled: Collection[fx.Node] = ()) -> list[tuple[int, fx.Node]]:
    """List the arguments that an operation may compute into as far as these look, with their positions.

    Where strides that count are unsettled, overwriting would be planned and then not done.
    """
    target, promised = node.target, nodes.operation_named(node.target).into
    is_first = target in _INTO_FIRST or promised is nodes.Into.FIRST
    if not (is_first or target in _INTO or promised is nodes.Into.BY_ROWS):
        return []
    values: list[Any] = [a.meta.get("val") for a in node.all_input_nodes]
    is_usual = all(v.layout is torch.strided if isinstance(v, torch.Tensor) else v is not None for v in values)
    if not is_usual or any(isinstance(value, fx.Node) for value in node.kwargs.values()):
        return []
    result = node.meta["val"]
    if not isinstance(result, torch.Tensor) or (target in _INTO_FIRST_BY_ROWS and not result.is_contiguous()):
        return []
    if result.dtype.is_complex:
        lie_alike = target is not aten.mul.Tensor or len({(v.shape, v.stride()) for v in values if v.dim()}) == 1
        if target in _COMPLEX_PRODUCTS or not lie_alike:
            return []
    elif not result.dtype.is_floating_point:
        return []
    arguments = [(i, a) for i, a in enumerate(node.args) if isinstance(a, fx.Node)]
    if is_first and node.args[0] in tensor_state.leaves(node.args[1:]):
        return []  # what is put there is read from there
    if target in _INTO and any(a in unsettled for _, a in arguments):
        return []
    taken = arguments[:1] if is_first else arguments
    return [(i, a) for i, a in taken if a not in unsettled and nodes.lies_as(a.meta["val"], result)]


def traced_strides(node: fx.Node, dying: int) -> Strides:
    """Return the positions of the tensors among an operation's arguments, with the strides that they were traced with.

    Of operations that put numbers into the dying argument, or overwrite it row by row, only that one counts.
    """
    values = ((i, a.meta["val"]) for i, a in enumerate(node.args) if isinstance(a, fx.Node))
    positions = tuple(
        (position, tuple(tensor_state.int_hint(s) for s in value.stride()))
        for position, value in values
        if isinstance(value, torch.Tensor)
    )
    return positions if node.target in _INTO else tuple(pair for pair in positions if pair[0] == dying)


@functools.cache
def overwriting(target: Any, position: int) -> Callable[..., torch.Tensor]:
    """Return the function that computes what an operator does into one of its arguments, where that is safe.

    It takes positions and strides of tensors among its arguments, as these were traced, then what the operator takes.
    With other strides the result might get other ones too, or the argument might not have memory of its own for each
    element.
    """
    into, name = _INTO.get(target) or _INTO_FIRST.get(target) or (target, "out")
    if isinstance(into, aot.OpOverload):
        into = schema_call(into)

    def overwrite(traced: Strides, *args: Any, **kwargs: Any) -> torch.Tensor:
        dying = args[position]
        for at, strides in traced:
            if args[at].stride() != strides:
                break
        else:
            if tensor_state.is_alone_on_storage(dying) and not torch.is_grad_enabled():
                kwargs[name] = dying
                return into(*args, **kwargs)  # type: ignore[no-any-return]
        return target(*args, **kwargs)  # type: ignore[no-any-return]

    called = getattr(target, "overloadpacket", target).__name__
    overwrite.__name__ = overwrite.__qualname__ = f"{called}_into_{position}"
    return overwrite


# ---------------------------------------------------------------- gradients


def overwrite(
    graph: Graph,
    fx_nodes: Sequence[fx.Node],
    fx_values: Sequence[fx.Node],
    spared: Collection[int | None] = (),
    absent: Collection[int | None] = (),
) -> tuple[Graph, dict[fx.Node, int], dict[int, int]]:
    """Make operations of the backward overwrite gradients that die there.

    Args:
        graph: A captured graph in which each operation allocates its results.
        fx_nodes: For each node of the graph, the FX node that it stands for.
        fx_values: For each tensor of the graph, the FX node whose value it is.
        spared: Storages that nothing overwrites.
        absent: Storages that nobody makes.

    Returns:
        The graph in which such results share the storage of what they overwrite; for each FX node that overwrites, the
        position of that argument; and for other nodes, the value of the forward that they may compute into, which only
        they read in the backward. Whether it lives on is for the schedule to say, and for those who hold what the
        forward returns.
    """
    search = _Search(graph, fx_nodes, fx_values, spared, absent)
    changed, overwrites = search.run()
    return changed, overwrites, search.takes(overwrites)


class _Search:
    """Goes through the backward once; what a result takes, later operations may take over from it."""

    def __init__(
        self,
        graph: Graph,
        fx_nodes: Sequence[fx.Node],
        fx_values: Sequence[fx.Node],
        spared: Collection[int | None],
        absent: Collection[int | None],
    ) -> None:
        self.graph, self.fx_nodes, self.absent = graph, fx_nodes, absent
        self.tensor_of = {value: index for index, value in enumerate(fx_values)}
        # For each storage, the last position of the backward that reads it; one past the end for what is returned.
        self.last = {graph.tensors[t].storage: at for at, n in enumerate(graph.backward) for t in graph.nodes[n].inputs}
        kept = (*graph.gradients, *graph.outputs, *graph.held)
        self.last |= {graph.tensors[t].storage: len(graph.backward) for t in kept}
        self.barred = _seen_by_others(graph, fx_nodes) | set(spared) | set(absent)
        self.unsettled = nodes.unsettled_among(fx_values[t] for t in graph.tangents)
        for index in graph.backward:
            nodes.note_unsettled(fx_nodes[index], self.unsettled)
        first: dict[int | None, int] = {}
        # Tensors on whose storage another one was there before.
        self.views = {t for t, tensor in enumerate(graph.tensors) if first.setdefault(tensor.storage, t) != t}
        self.returned = {graph.tensors[t].storage for t in graph.gradients}
        self.taken: dict[int | None, int] = {}  # storage of a result -> storage that it takes

    def run(self) -> tuple[Graph, dict[fx.Node, int]]:
        records, overwrites = list(self.graph.nodes), dict[fx.Node, int]()
        for position, index in enumerate(self.graph.backward):
            safe = [pair for pair in self._candidates(index) if self._is_safe(position, index, pair[1])]
            if safe:
                overwrites[self.fx_nodes[index]], dying = safe[0]
                self._take(index, dying)
                records[index] = replace(records[index], is_mutating=True)
        tensors = tuple(replace(t, storage=self.taken.get(t.storage, t.storage)) for t in self.graph.tensors)
        sizes = (0 if i in self.taken else storage.size_bytes for i, storage in enumerate(self.graph.storages))
        storages = tuple(replace(s, size_bytes=size) for s, size in zip(self.graph.storages, sizes, strict=True))
        return replace(self.graph, nodes=tuple(records), tensors=tensors, storages=storages), overwrites

    def takes(self, overwrites: Collection[fx.Node]) -> dict[int, int]:
        graph, takes, readers = self.graph, dict[int, int](), dict[int | None, set[int]]()
        for index in graph.backward:
            for tensor in graph.nodes[index].inputs:
                readers.setdefault(graph.tensors[tensor].storage, set()).add(index)
        returned = {self._block(t) for t in graph.gradients}
        for index in graph.backward:
            if self.fx_nodes[index] in overwrites or not returned.isdisjoint(graph.allocates[index]):
                continue
            read = self._blocks_read(index)
            for _, tensor in self._candidates(index):
                storage = graph.tensors[tensor].storage
                is_alone = readers[storage] == {index} and read.count(storage) == 1 and storage not in returned
                if storage is not None and graph.storages[storage].kind is StorageKind.ACTIVATION and is_alone:
                    takes[index] = tensor
        return takes

    def _candidates(self, index: int) -> list[tuple[int, int]]:
        """List the positions of the arguments that a node may compute into as far as these look, and the tensors."""
        node = self.fx_nodes[index]
        if len(self.graph.allocates[index]) != 1 or nodes.may_lie_otherwise(node):
            return []
        return [(place, self.tensor_of[value]) for place, value in candidates_of(node, self.unsettled)]

    def _block(self, tensor: int) -> int | None:
        storage = self.graph.tensors[tensor].storage
        return self.taken.get(storage, storage)

    def _blocks_read(self, index: int) -> list[int | None]:
        return [self._block(self.tensor_of[a]) for a in self.fx_nodes[index].all_input_nodes]

    def _is_safe(self, position: int, index: int, dying: int) -> bool:
        """Whether an operation may write its result over one of its arguments."""
        block, result = self._block(dying), self.graph.nodes[index].outputs[0]
        if block is None or self.graph.storages[block].kind is not StorageKind.GRADIENT or not self.graph.sizes[block]:
            return False
        if self.last[block] > position or block in self.barred or self.graph.allocates[index][0] in self.absent:
            return False
        if self._blocks_read(index).count(block) > 1:
            return False
        # The caller would get a view, which may not be changed in place as freely.
        return dying not in self.views or self.graph.tensors[result].storage not in self.returned

    def _take(self, index: int, dying: int) -> None:
        """Place the result in the memory of the dying value: facts about its own storage now hold for that one."""
        result = self.graph.nodes[index].outputs[0]
        block, storage = self._block(dying), self.graph.tensors[result].storage
        assert block is not None, "what is overwritten has memory"
        self.taken[storage] = block
        self.last[block] = self.last.get(storage, -1)
        if storage in self.barred:
            self.barred.add(block)
        if dying in self.views:
            self.views.add(result)


def _seen_by_others(graph: Graph, fx_nodes: Sequence[fx.Node]) -> set[int | None]:
    """List the storages read or made by what may keep them, or hand them on: what no schema of PyTorch's tells of."""
    seen = set[int | None]()
    for index in graph.backward:
        node, target = graph.nodes[index], fx_nodes[index].target
        says_all = nodes.is_of_torch(target) and not (nodes.is_view(target) and graph.allocates[index])
        if not says_all and not nodes.operation_named(target).keeps_nothing:
            seen.update(graph.tensors[t].storage for t in (*node.inputs, *node.outputs))
    return seen


# ---------------------------------------------------------------- what finishes results of the forward


@dataclass(frozen=True, slots=True)
class Finish:
    """What finishes one result of an operation."""

    value: fx.Node  # the result as the operation makes it
    steps: tuple[fx.Node, ...]  # operations over it, and views of it, in order; the last one gives what others read
    at_all_sizes: bool = False  # whether small values are treated as large ones, in a program for all sizes

    @property
    def result(self) -> fx.Node:
        """What others read in place of the value."""
        return self.steps[-1]

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        """What the steps read beside the value."""
        inside = {self.value, *self.steps}
        return tuple(dict.fromkeys(a for step in self.steps for a in step.all_input_nodes if a not in inside))

    def calls(self) -> Iterator[tuple[fx.Node, Any, tuple[Any, ...]]]:
        """Return for each step what runs it, and its arguments, in which FX nodes stand for values.

        The steps are the same for small values and for large ones, so that a graph is the same for all batch sizes.
        """
        value = self.value
        size_bytes = value.meta["val"].untyped_storage().nbytes()
        is_small = not self.at_all_sizes and size_bytes < thresholds.current.finished_bytes
        for step in self.steps:
            if is_small or nodes.is_view(step.target):
                yield step, step.target, step.args
            else:
                dying = step.args.index(value)
                yield step, overwriting(step.target, dying), (traced_strides(step, dying), *step.args)
            value = step


def find_finishes(
    operations: Sequence[fx.Node], outputs: Collection[Any], overwritten: Collection[fx.Node]
) -> dict[fx.Node, Finish]:
    """Find the operations of a forward whose results others finish, where the step writes to the memory of some values.

    What finishes a result runs at once: all else that its steps read is there before the operation runs. And it is no
    operation that another could finish.
    """
    position = {node: at for at, node in enumerate(operations)}
    outputs, overwritten = set(outputs), set(overwritten)

    def finishes(reader: fx.Node, value: fx.Node, first: fx.Node, is_viewed: bool) -> bool:
        if [a for _, a in candidates_of(reader)].count(value) != 1:
            return False
        if reader in outputs and is_viewed:
            return False  # the caller would get a view, which may not be changed in place as freely
        others = [a for a in reader.all_input_nodes if a is not value]
        makers = (maker for maker in map(nodes.operation_of, others) if maker.op not in ("placeholder", "get_attr"))
        return not any(a in overwritten for a in others) and all(position[m] < position[first] for m in makers)

    def steps_of(first: fx.Node, value: fx.Node) -> tuple[fx.Node, ...]:
        steps: list[fx.Node] = []
        count = 0  # views behind the last operation belong to what reads them
        while len(value.users) == 1:
            (reader,) = value.users
            if reader not in position or nodes.is_part(reader):
                break
            steps.append(reader)
            is_only_view = nodes.is_view(reader.target) and reader.all_input_nodes == [value] and reader not in outputs
            if not is_only_view:
                if not finishes(reader, value, first, any(nodes.is_view(step.target) for step in steps[:-1])):
                    break
                count = len(steps)
            value = reader
        return tuple(steps[:count])

    finished, taken = dict[fx.Node, Finish](), set[fx.Node]()
    for node in operations:
        if node in taken or not _allocates(node.target):
            continue
        own = filter(nodes.is_on_new_memory, nodes.values_of(node))
        fresh = (value for value in own if not tensor_state.is_symbolic(value.meta["val"]))
        finish = next((Finish(value, steps) for value in fresh if (steps := steps_of(node, value))), None)
        if finish is not None:
            finished[node] = finish
            taken.update(finish.steps)
    return finished


def _allocates(target: Any) -> bool:
    """Whether an operator is PyTorch's own, or stands for one, and makes new memory, of the size that a trace says."""
    is_own = nodes.is_of_torch(target) and not nodes.is_view(target) and target not in nodes.COPIES_STORAGE
    return is_own or nodes.operation_named(target).is_fresh
