"""In-place computation: an operation writes its result with eager's kernel into an input that nothing reads later.

`overwrite` finds gradients that backward operations may overwrite: storages that the backward allocates, that no later
operation reads through any tensor, and that only PyTorch's own operators have read. It also finds forward values whose
memory a gradient may take, such as the logits for the gradient of their loss. `find_finishes` finds forward operations
that may change the result of another operation in place, as `relu_` does. No plan gets worse: saving the value before
the change takes as many bytes as saving the result.

Gradients may arrive with other strides than traced, and other code may hold outputs of the forward. So each overwriting
operation checks its arguments at run time, and allocates its result if it may not overwrite.
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
    """Wrap an operator that changes its first argument, so that it also accepts this argument as `out`."""

    def into(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = change(*args, **kwargs)
        return result

    return into


# Pointwise operator -> function that runs its kernel and writes into a given tensor, name of that argument. Of each
# tensor the operator reads only the element that it writes next. Not listed are operators whose overload only copies a
# new result (`hardswish_backward`) or rounds differently (`mul_.Scalar`).
_INTO: dict[Any, tuple[Any, str]] = {
    aten.add.Tensor: (torch.add, "out"),
    aten.sub.Tensor: (torch.sub, "out"),
    aten.mul.Tensor: (torch.mul, "out"),
    aten.mul.Scalar: (torch.mul, "out"),
    aten.div.Tensor: (torch.div, "out"),
    aten.div.Scalar: (torch.div, "out"),
    aten.where.self: (torch.where, "out"),
    aten.leaky_relu.default: (aten.leaky_relu.out, "out"),
    aten.relu.default: (_in_place(torch.relu_), "out"),
}
for _name in ("exp", "neg", "rsqrt", "sigmoid", "sqrt", "tanh"):
    _INTO[getattr(aten, _name).default] = (getattr(torch, _name), "out")
_NAMES = ("elu", "gelu", "hardsigmoid", "hardtanh", "leaky_relu", "sigmoid", "silu", "softplus", "tanh", "threshold")
for _name in _NAMES:
    _backward = getattr(aten, f"{_name}_backward")
    _INTO[_backward.default] = (_backward.grad_input, "grad_input")

# Operators that read a row of their first argument before they write the row. The output must be contiguous.
_INTO_FIRST_BY_ROWS: dict[Any, tuple[Any, str]] = {
    aten._log_softmax_backward_data.default: (aten._log_softmax_backward_data.out, "out"),
    aten._softmax_backward_data.default: (aten._softmax_backward_data.out, "grad_input"),
    aten._log_softmax.default: (aten._log_softmax.out, "out"),
    aten._softmax.default: (aten._softmax.out, "out"),
}
# Operators that change a copy of their first argument, or only copy it. Only this argument may be overwritten; the
# other arguments may have any strides.
_INTO_FIRST: dict[Any, tuple[Any, str]] = {
    aten.clone.default: (_in_place(lambda source, **options: source), "out"),
    aten.index_add.default: (aten.index_add.out, "out"),
    aten.index_put.default: (_in_place(aten.index_put_.default), "out"),
    aten.masked_fill.Scalar: (_in_place(aten.masked_fill_.Scalar), "out"),
    aten.scatter_add.default: (aten.scatter_add.out, "out"),
    **_INTO_FIRST_BY_ROWS,
}

# Operators that autograd runs in place too if it may: it adds gradients up in the first one, and fills zeros.
_IN_PLACE_IN_EAGER = (aten.add.Tensor, aten.index_add.default, aten.index_put.default, aten.scatter_add.default)

# For complex numbers, these operators round differently in place than out of place: the compiler's choice of
# instructions depends on whether tensors overlap. `mul` does not if all tensors have the same strides.
_COMPLEX_PRODUCTS = (aten.div.Tensor, aten.sigmoid_backward.default, aten.tanh_backward.default)

Strides = tuple[tuple[int, tuple[int, ...]], ...]  # pairs of an argument's position and its strides


def candidates_of(node: fx.Node, unsettled: Collection[fx.Node] = ()) -> list[tuple[int, fx.Node]]:
    """List the positions of arguments whose shapes, strides and types let an operation write into them, with the nodes.

    Arguments in `unsettled` may arrive with other strides than traced, and then could not be overwritten.
    """
    target, into = node.target, nodes.operation_named(node.target).into
    is_first = target in _INTO_FIRST or into is nodes.Into.FIRST
    if not (is_first or target in _INTO or into is nodes.Into.BY_ROWS):
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
        return []  # it also reads from the tensor that it would change
    if target in _INTO and any(a in unsettled for _, a in arguments):
        return []
    taken = arguments[:1] if is_first else arguments
    return [(i, a) for i, a in taken if a not in unsettled and nodes.lies_as(a.meta["val"], result)]


def result_strides(node: fx.Node, dying: int) -> Strides:
    """Return the positions of the tensors among an operation's arguments, with their traced strides.

    If the operation is not pointwise, return only the overwritten argument, at the position `dying`.
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
    """Return a function that runs an operator and writes the result into the argument at a position if that is safe.

    Its first argument is the result of `result_strides`, the others are the operator's. It allocates the result if
    strides differ from the traced ones: the result might have other strides, or elements might share memory.
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
    """Make backward operations overwrite gradients that nothing reads later.

    Args:
        graph: A captured graph in which each operation allocates its results.
        fx_nodes: For each node of the graph, its FX node.
        fx_values: For each tensor of the graph, the FX node that has its value.
        spared: Storages that must not be overwritten.
        absent: Storages that are not allocated, since their gradients are missing.

    Returns:
        The graph in which results share the storages that they overwrite; for each FX node that overwrites, the
        position of the overwritten argument; and for other nodes, by index, a forward tensor whose memory the result
        may take: no other backward node reads the tensor, but a schedule or the caller may still need it.
    """
    search = _Search(graph, fx_nodes, fx_values, spared, absent)
    changed, overwrites = search.run()
    return changed, overwrites, search.takes(overwrites)


class _Search:
    """Walks the backward once; memory that a result has taken may be taken by a later result."""

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
        # Storage -> position of its last reader in the backward; one past the end if it is returned or held.
        self.last = {graph.tensors[t].storage: at for at, n in enumerate(graph.backward) for t in graph.nodes[n].inputs}
        kept = (*graph.gradients, *graph.outputs, *graph.held)
        self.last |= {graph.tensors[t].storage: len(graph.backward) for t in kept}
        self.barred = {*spared, *absent}
        self.unsettled = nodes.unsettled_among(fx_values[t] for t in graph.tangents)
        for index in graph.backward:
            node, target = graph.nodes[index], fx_nodes[index].target
            nodes.note_unsettled(fx_nodes[index], self.unsettled)
            # An operation may keep or alias all that it touches, unless its schema or its registration excludes it.
            says_all = nodes.is_of_torch(target) and not (nodes.is_view(target) and graph.allocates[index])
            if not says_all and not nodes.operation_named(target).keeps_nothing:
                self.barred.update(graph.tensors[t].storage for t in (*node.inputs, *node.outputs))
        first: dict[int | None, int] = {}
        # Tensors that are not the first one on their storage.
        self.views = {t for t, tensor in enumerate(graph.tensors) if first.setdefault(tensor.storage, t) != t}
        self.returned = {graph.tensors[t].storage for t in graph.gradients}
        self.taken: dict[int | None, int] = {}  # storage of a result -> storage that the result overwrites

    def run(self) -> tuple[Graph, dict[fx.Node, int]]:
        records, overwrites = list(self.graph.nodes), dict[fx.Node, int]()
        for position, index in enumerate(self.graph.backward):
            safe = [pair for pair in self._candidates(index) if self._is_safe(position, index, pair[1])]
            if safe:
                place, dying = safe[0]
                overwrites[self.fx_nodes[index]] = place
                self._take(index, dying)
                is_as_in_eager = place == 0 and self.fx_nodes[index].target in _IN_PLACE_IN_EAGER
                records[index] = replace(records[index], is_mutating=True, is_out_of_place_in_eager=not is_as_in_eager)
        tensors = tuple(replace(t, storage=self.taken.get(t.storage, t.storage)) for t in self.graph.tensors)
        sized = enumerate(self.graph.storages)
        storages = tuple(replace(storage, size_bytes=0) if i in self.taken else storage for i, storage in sized)
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
        """List the positions and tensors of the arguments that a node may write into by their layouts."""
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
        """Whether an operation may overwrite one of its arguments with its result."""
        block, result = self._block(dying), self.graph.nodes[index].outputs[0]
        if block is None or self.graph.storages[block].kind is not StorageKind.GRADIENT or not self.graph.sizes[block]:
            return False
        if self.last[block] > position or block in self.barred or self.graph.allocates[index][0] in self.absent:
            return False
        if self._blocks_read(index).count(block) > 1:
            return False
        # The caller must not get a view, since autograd restricts in-place changes of views.
        return dying not in self.views or self.graph.tensors[result].storage not in self.returned

    def _take(self, index: int, dying: int) -> None:
        """Place a result in the storage of the overwritten value, and move the facts about its own storage there."""
        result = self.graph.nodes[index].outputs[0]
        block, storage = self._block(dying), self.graph.tensors[result].storage
        assert block is not None, "what is overwritten has memory"
        self.taken[storage] = block
        self.last[block] = self.last.get(storage, -1)
        if storage in self.barred:
            self.barred.add(block)
        if dying in self.views:
            self.views.add(result)


# ---------------------------------------------------------------- in-place changes of forward results


@dataclass(frozen=True, slots=True)
class Finish:
    """Operations that change one result of another operation in place, as part of the same node."""

    value: fx.Node  # the result before the changes
    steps: tuple[fx.Node, ...]  # in-place operations and views, in order; others read the result of the last one
    at_all_sizes: bool = False  # whether small values are changed in place too, in a program for all sizes

    @property
    def result(self) -> fx.Node:
        """The finished value, which others read."""
        return self.steps[-1]

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        """The inputs of the steps beside the value."""
        inside = {self.value, *self.steps}
        return tuple(dict.fromkeys(a for step in self.steps for a in step.all_input_nodes if a not in inside))

    def calls(self) -> Iterator[tuple[fx.Node, Any, tuple[Any, ...]]]:
        """Yield each step, the function that runs it, and its arguments, in which FX nodes stand for values.

        Small values have the same steps, but out of place, so that the graph is equal for all batch sizes.
        """
        value = self.value
        size_bytes = value.meta["val"].untyped_storage().nbytes()
        is_small = not self.at_all_sizes and size_bytes < thresholds.current.finished_bytes
        for step in self.steps:
            if is_small or nodes.is_view(step.target):
                yield step, step.target, step.args
            else:
                dying = step.args.index(value)
                yield step, overwriting(step.target, dying), (result_strides(step, dying), *step.args)
            value = step


def find_finishes(
    operations: Sequence[fx.Node], outputs: Collection[Any], overwritten: Collection[fx.Node]
) -> dict[fx.Node, Finish]:
    """Find the forward operations whose results other operations may change in place.

    The steps run at once after the operation, so their other inputs must exist before the operation runs, and must not
    be in `overwritten`, the values whose memory the step writes to. A step has no finish of its own.
    """
    position = {node: at for at, node in enumerate(operations)}
    outputs, overwritten = set(outputs), set(overwritten)

    def finishes(reader: fx.Node, value: fx.Node, first: fx.Node, is_viewed: bool) -> bool:
        if [a for _, a in candidates_of(reader)].count(value) != 1:
            return False
        if reader in outputs and is_viewed:
            return False  # the caller must not get a view, since autograd restricts in-place changes of views
        reads = [a for a in reader.all_input_nodes if a is not value]
        makers = (maker for maker in map(nodes.operation_of, reads) if maker.op not in ("placeholder", "get_attr"))
        return not any(a in overwritten for a in reads) and all(position[m] < position[first] for m in makers)

    def steps_of(first: fx.Node, value: fx.Node) -> tuple[fx.Node, ...]:
        steps: list[fx.Node] = []
        count = 0  # number of steps up to the last operation: views after it belong to their readers
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
        target = node.target
        allocates = nodes.is_of_torch(target) and not nodes.is_view(target) and target not in nodes.COPIES_STORAGE
        if node in taken or not (allocates or nodes.operation_named(target).is_fresh):
            continue
        allocated = filter(nodes.is_on_new_memory, nodes.values_of(node))
        fresh = (value for value in allocated if not tensor_state.is_symbolic(value.meta["val"]))
        finish = next((Finish(value, steps) for value in fresh if (steps := steps_of(node, value))), None)
        if finish is not None:
            finished[node] = finish
            taken.update(finish.steps)
    return finished
