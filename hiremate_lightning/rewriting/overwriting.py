"""Values that are overwritten: an operation computes into what dies there.

Eager PyTorch holds both at that moment, what is read and what is made. Here the second takes the memory of the first,
where nothing can tell. `overwrite` finds gradients that operations of the backward may overwrite: only memory that the
backward itself has allocated, that no later operation reads through any tensor on it, and that no code but PyTorch's
own has seen. `find_takes` finds values of the forward whose memory a gradient may take, such as logits that of their
loss. What of the forward computes into what is told by `finishing`. The kernel is that of eager, told where to write.

The trace says which tensors share memory, and with which strides they come. What runs may differ, where gradients
arrive with other strides, and others may hold what the forward returned. So each overwriting operation looks before it
writes, and else allocates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..records.graph import Graph, StorageKind
from ..torch_private import aot, tensor_state
from ..torch_private.operators import schema_call
from .joint import follows_strides, may_lie_otherwise
from .operations import Into, operation_named

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
    aten.elu_backward.default: (aten.elu_backward.grad_input, "grad_input"),
    aten.gelu_backward.default: (aten.gelu_backward.grad_input, "grad_input"),
    aten.hardsigmoid_backward.default: (aten.hardsigmoid_backward.grad_input, "grad_input"),
    aten.hardtanh_backward.default: (aten.hardtanh_backward.grad_input, "grad_input"),
    aten.leaky_relu_backward.default: (aten.leaky_relu_backward.grad_input, "grad_input"),
    aten.sigmoid_backward.default: (aten.sigmoid_backward.grad_input, "grad_input"),
    aten.silu_backward.default: (aten.silu_backward.grad_input, "grad_input"),
    aten.softplus_backward.default: (aten.softplus_backward.grad_input, "grad_input"),
    aten.tanh_backward.default: (aten.tanh_backward.grad_input, "grad_input"),
    aten.threshold_backward.default: (aten.threshold_backward.grad_input, "grad_input"),
    aten.exp.default: (torch.exp, "out"),
    aten.leaky_relu.default: (aten.leaky_relu.out, "out"),
    aten.relu.default: (_in_place(torch.relu_), "out"),
    aten.rsqrt.default: (torch.rsqrt, "out"),
    aten.sigmoid.default: (torch.sigmoid, "out"),
    aten.sqrt.default: (torch.sqrt, "out"),
    aten.tanh.default: (torch.tanh, "out"),
}

# Of these only the first argument may be overwritten, and how the others lie in memory doesn't matter: numbers are put
# into a copy of it, or added there.
_INTO_FIRST: dict[Any, tuple[Any, str]] = {
    aten.index_add.default: (aten.index_add.out, "out"),
    aten.index_put.default: (_in_place(aten.index_put_.default), "out"),
    aten.masked_fill.Scalar: (_in_place(aten.masked_fill_.Scalar), "out"),
    aten.scatter_add.default: (aten.scatter_add.out, "out"),
}
# These read a row of it before they write the row, and take what they write to for contiguous.
_INTO_FIRST_BY_ROWS: dict[Any, tuple[Any, str]] = {
    aten._log_softmax_backward_data.default: (aten._log_softmax_backward_data.out, "out"),
    aten._softmax_backward_data.default: (aten._softmax_backward_data.out, "grad_input"),
    aten._log_softmax.default: (aten._log_softmax.out, "out"),
    aten._softmax.default: (aten._softmax.out, "out"),
}
_INTO_FIRST |= _INTO_FIRST_BY_ROWS

# Of complex numbers these round by whether they write over what they read: PyTorch leaves the choice of instructions to
# the compiler, which lets them look. Products don't where all tensors lie alike.
_COMPLEX_PRODUCTS = (aten.div.Tensor, aten.sigmoid_backward.default, aten.tanh_backward.default)

Strides = tuple[tuple[int, tuple[int, ...]], ...]


def overwrite(
    graph: Graph,
    fx_nodes: Sequence[fx.Node],
    fx_values: Sequence[fx.Node],
    spared: Collection[int] = (),
    absent: Collection[int] = (),
) -> tuple[Graph, dict[fx.Node, int]]:
    """Make operations of the backward overwrite gradients that die there.

    Args:
        graph: A captured graph in which each operation allocates its results.
        fx_nodes: For each node of the graph, the FX node that it stands for.
        fx_values: For each tensor of the graph, the FX node whose value it is.
        spared: Storages that nothing overwrites.
        absent: Storages that nobody makes.

    Returns:
        The graph in which such results share the storage of what they overwrite, and for each FX node that overwrites
        the position of that argument.
    """
    return _Search(graph, fx_nodes, fx_values, spared, absent).run()


class _Search:
    """Goes through the backward once; what a result takes, later operations may take over from it."""

    def __init__(
        self,
        graph: Graph,
        fx_nodes: Sequence[fx.Node],
        fx_values: Sequence[fx.Node],
        spared: Collection[int],
        absent: Collection[int],
    ) -> None:
        self.graph, self.fx_nodes, self.fx_values = graph, fx_nodes, fx_values
        self.tensor_of = {value: index for index, value in enumerate(fx_values)}
        # For each storage, the last position of the backward that reads it; one past the end for what is returned.
        self.last = {graph.tensors[t].storage: at for at, n in enumerate(graph.backward) for t in graph.nodes[n].inputs}
        kept = (*graph.gradients, *graph.outputs, *graph.held)
        self.last |= {graph.tensors[t].storage: len(graph.backward) for t in kept}
        self.barred = _seen_by_others(graph, fx_nodes) | set(spared) | set(absent)
        self.absent = absent
        self.unsettled = _unsettled(graph, fx_nodes)
        first: dict[int | None, int] = {}
        # Tensors on whose storage another one was there before.
        self.views = {t for t, tensor in enumerate(graph.tensors) if first.setdefault(tensor.storage, t) != t}
        self.returned = {graph.tensors[t].storage for t in graph.gradients}
        self.taken: dict[int | None, int] = {}  # storage of a result -> storage that it takes

    def run(self) -> tuple[Graph, dict[fx.Node, int]]:
        nodes, overwrites = list(self.graph.nodes), dict[fx.Node, int]()
        for position, index in enumerate(self.graph.backward):
            node, made, fx_node = self.graph.nodes[index], self.graph.allocates[index], self.fx_nodes[index]
            if not len(node.outputs) == len(made) == 1 or made[0] in self.absent or may_lie_otherwise(fx_node):
                continue
            if not self.unsettled.isdisjoint(node.inputs[:1] if _is_into_first(fx_node.target) else node.inputs):
                continue
            candidates = ((place, self.tensor_of[a]) for place, a in candidates_of(fx_node))
            safe = [(place, dying) for place, dying in candidates if self._is_safe(position, index, dying)]
            if safe:
                overwrites[fx_node], dying = safe[0]
                self._take(index, dying)
                nodes[index] = replace(node, is_mutating=True)
        tensors = tuple(replace(t, storage=self.taken.get(t.storage, t.storage)) for t in self.graph.tensors)
        sizes = (0 if i in self.taken else storage.size_bytes for i, storage in enumerate(self.graph.storages))
        storages = tuple(replace(s, size_bytes=size) for s, size in zip(self.graph.storages, sizes, strict=True))
        return replace(self.graph, nodes=tuple(nodes), tensors=tensors, storages=storages), overwrites

    def _block(self, tensor: int) -> int | None:
        storage = self.graph.tensors[tensor].storage
        return self.taken.get(storage, storage)

    def _is_safe(self, position: int, index: int, dying: int) -> bool:
        """Whether an operation may write its result over one of its arguments."""
        block, result = self._block(dying), self.graph.nodes[index].outputs[0]
        if block is None or self.graph.storages[block].kind is not StorageKind.GRADIENT or not self.graph.sizes[block]:
            return False
        if self.last[block] > position or block in self.barred:
            return False
        if [self._block(self.tensor_of[a]) for a in self.fx_nodes[index].all_input_nodes].count(block) > 1:
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


def find_takes(
    graph: Graph, fx_nodes: Sequence[fx.Node], fx_values: Sequence[fx.Node], overwrites: Collection[fx.Node]
) -> dict[int, int]:
    """Find operations of the backward that may compute into a value of the forward which only they read there.

    Args:
        graph: A captured graph.
        fx_nodes: For each node of the graph, the FX node that it stands for.
        fx_values: For each tensor of the graph, the FX node whose value it is.
        overwrites: Those that overwrite gradients.

    Returns:
        The tensor by node. Whether it lives on is for the schedule to say, and for those who hold what the forward
        returns.
    """
    tensor_of = {value: index for index, value in enumerate(fx_values)}
    readers: dict[int | None, set[int]] = {}
    for index in graph.backward:
        for tensor in graph.nodes[index].inputs:
            readers.setdefault(graph.tensors[tensor].storage, set()).add(index)
    returned, unsettled = {graph.tensors[t].storage for t in graph.gradients}, _unsettled(graph, fx_nodes)
    takes: dict[int, int] = {}
    for index in graph.backward:
        node, made = fx_nodes[index], graph.allocates[index]
        if node in overwrites or len(made) != 1 or made[0] in returned or may_lie_otherwise(node):
            continue
        if node.target in _INTO and not unsettled.isdisjoint(graph.nodes[index].inputs):
            continue
        for _, value in candidates_of(node):
            storage = graph.tensors[tensor_of[value]].storage
            if (
                storage is not None
                and graph.storages[storage].kind is StorageKind.ACTIVATION
                and readers[storage] == {index}
                and [graph.tensors[tensor_of[a]].storage for a in node.all_input_nodes].count(storage) == 1
                and storage not in returned
            ):
                takes[index] = tensor_of[value]
    return takes


def _seen_by_others(graph: Graph, fx_nodes: Sequence[fx.Node]) -> set[int | None]:
    """List the storages read or made by what may keep them, or hand on its input as its result: unlike PyTorch's own.

    PyTorch's operators say in their schema which results lie on an input's memory; others are not trusted to.
    """
    seen = set[int | None]()
    for index in graph.backward:
        node = graph.nodes[index]
        target: Any = fx_nodes[index].target
        if operation_named(target).keeps_nothing:
            continue
        is_own = isinstance(target, aot.OpOverload) and target.namespace == "aten"
        if is_own and not target._schema.is_mutable and not (target.is_view and graph.allocates[index]):
            continue
        seen.update(graph.tensors[t].storage for t in (*node.inputs, *node.outputs))
    return seen


def _unsettled(graph: Graph, fx_nodes: Sequence[fx.Node]) -> set[int]:
    """List the tensors that may come with other strides than traced, as gradients from the caller do.

    Overwriting would be planned there and then not done.
    """
    unsettled = {t for t in graph.tangents if graph.tensors[t].shape}
    for index in graph.backward:
        node, target = graph.nodes[index], fx_nodes[index].target
        follows = operation_named(target).follows_strides or follows_strides(target) or not graph.allocates[index]
        if (follows and not unsettled.isdisjoint(node.inputs)) or may_lie_otherwise(fx_nodes[index]):
            unsettled.update(node.outputs)
    return unsettled


def _is_into_first(target: Any) -> bool:
    """Whether an operation may compute into its first argument alone."""
    return target in _INTO_FIRST or operation_named(target).into is Into.FIRST


def candidates_of(node: fx.Node) -> list[tuple[int, fx.Node]]:
    """List the arguments that an operation may compute into as far as these look, with their positions."""
    is_first, target = _is_into_first(node.target), node.target
    if not (is_first or target in _INTO or operation_named(target).into is Into.BY_ROWS):
        return []
    values: list[Any] = [a.meta.get("val") for a in node.all_input_nodes]
    is_usual = all(v.layout is torch.strided if isinstance(v, torch.Tensor) else v is not None for v in values)
    if not is_usual or any(isinstance(value, fx.Node) for value in node.kwargs.values()):
        return []
    result = node.meta["val"]
    if node.target in _INTO_FIRST_BY_ROWS and not result.is_contiguous():
        return []
    if isinstance(result, torch.Tensor) and result.dtype.is_complex:
        lie_alike = target is not aten.mul.Tensor or len({(v.shape, v.stride()) for v in values if v.dim()}) == 1
        if target in _COMPLEX_PRODUCTS or not lie_alike:
            return []
    arguments = [(i, a) for i, a in enumerate(node.args) if isinstance(a, fx.Node)]
    if is_first and node.args[0] in tensor_state.leaves(node.args[1:]):
        return []  # what is put there is read from there
    taken = arguments[:1] if is_first else arguments
    return [(i, a) for i, a in taken if _look_alike(a.meta["val"], result)]


def _look_alike(dying: Any, result: Any) -> bool:
    """Whether a tensor fills its memory just as a result would fill its own."""
    if not isinstance(dying, torch.Tensor) or not isinstance(result, torch.Tensor):
        return False
    if tensor_state.is_symbolic(result) or tensor_state.is_symbolic(dying) or dying.is_neg() or dying.is_conj():
        return False
    shapes = (dying.shape, dying.stride(), dying.dtype, dying.device)
    size = result.numel() * result.itemsize
    return (
        (result.dtype.is_floating_point or result.dtype.is_complex)
        and shapes == (result.shape, result.stride(), result.dtype, result.device)
        and dying.storage_offset() == result.storage_offset() == 0
        and dying.untyped_storage().nbytes() == result.untyped_storage().nbytes() == size
    )


def traced_strides(node: fx.Node, dying: int) -> Strides:
    """Return the positions of the tensors among an operation's arguments, with the strides that they were traced with.

    Of operations that put numbers into one argument, or overwrite it row by row, only that one counts.

    Args:
        node: What overwrites.
        dying: The position of what it overwrites.
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
