"""Facts about a joint FX graph: which nodes compute, belong to the forward, draw or write; how values share memory.

PyTorch traces forward and backward into one graph. The passes and the maker of records share these functions. A pass
that replaces PyTorch's operators by a function of this package registers an `Operation` for the function here: what
eager PyTorch needs for the same work, and whether the function may overwrite memory.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from ..torch_private import aot, operators, tensor_state

aten = torch.ops.aten

# Forward operators that may differ in the last bit, or return another index, in a second run on a GPU, since the order
# of their additions is not fixed. PyTorch calls them nondeterministic in its kernels or in the documentation of
# `torch.use_deterministic_algorithms`; other scans, modes, segment reductions and sparse products are added for safety.
_ORDER_DEPENDENT_ON_GPU = re.compile(
    r"aten\.(scatter_add|scatter_reduce|scatter\.src|scatter\.reduce|index_add|index_copy|index_put|_unsafe_index_put|"
    r"index_reduce|put|segment_reduce|histc|bincount|cumsum|cumprod|logcumsumexp|kthvalue|median|nanmedian|mode|"
    r"max_unpool2d|max_unpool3d|nll_loss2d_forward|_sparse_mm|_sparse_addmm|_cudnn_ctc_loss)\b"
)
# Higher-order operators whose second run gives the same values if the operators in their subgraphs do so.
_CALLS_SUBGRAPHS = {"associative_scan", "cond", "flex_attention", "invoke_subgraph", "map_impl", "scan"}
_CALLS_SUBGRAPHS |= {"while_loop", "while_loop_stack_output"}
CALLS_AN_OPERATOR = {"auto_functionalized", "auto_functionalized_v2"}  # they call an operator that mutates arguments
TRITON = "triton_kernel_wrapper_functional"  # calls a user's Triton kernel
# Namespaces of operators that communicate with other processes, so their number and order must not change.
_COLLECTIVE = {"_c10d_functional", "_c10d_functional_autograd", "c10d"}
_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
# Operator -> memory formats in which its results have the traced strides, if all its inputs and results have the
# format. In other formats the results may have other strides than traced.
_TRACED_OTHERWISE: dict[Any, tuple[torch.memory_format, ...]] = {
    aten._log_softmax_backward_data.default: _FORMATS,
    aten.elu_backward.default: _FORMATS,
    aten.glu_backward.default: _FORMATS[:1],
    aten.hardswish_backward.default: _FORMATS,
    aten.hardtanh_backward.default: _FORMATS,
    aten.mse_loss_backward.default: _FORMATS,
    aten.native_batch_norm_backward.default: _FORMATS,
    aten.native_dropout_backward.default: _FORMATS,
    aten.native_group_norm_backward.default: _FORMATS,
    aten.native_layer_norm_backward.default: _FORMATS[:1],
    aten.softplus_backward.default: _FORMATS,
}
# If the input of these operators is a view, eager's kernels copy its whole storage; the trace counts only the view.
COPIES_STORAGE = {
    aten.copy.default,
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.diagonal_scatter.default,
    aten.as_strided_scatter.default,
}
# Operators, beside pointwise ones and views, whose result has the strides of their first input.
_FOLLOWS_STRIDES = COPIES_STORAGE | {
    aten._to_copy.default,
    aten.hardswish_backward.default,
    aten.index_put.default,
    aten.mish_backward.default,
}
# Views with the same elements in the same order.
SHAPES = (aten.view.default, aten._unsafe_view.default)
_ORIGIN = ("nn_module_stack", "stack_trace", "fwd_nn_module_stack")


class Into(Enum):
    """The arguments that an operation accepts as `out`, to write its result into them."""

    FIRST = "its first argument, however the others lie in memory; a result of its own has the same strides"
    BY_ROWS = "any that looks like the result: it is made some rows after the other"


@dataclass(frozen=True, slots=True)
class Operation:
    """Properties of a function in a joint graph, registered by the module that inserts it."""

    eager_bytes: Callable[[fx.Node], int] = lambda node: 0  # workspace of eager PyTorch for the same work
    eager_reads: Callable[[fx.Node], tuple[fx.Node, ...]] = lambda node: ()  # values that only eager PyTorch reads
    unread_in_eager: Callable[[fx.Node], tuple[fx.Node, ...]] = lambda node: ()  # inputs that eager does not read
    eager_times: Callable[[fx.Node, int], int] = lambda node, position: 1  # size of a result in eager / size here
    is_fresh: bool = False  # its results have new storages of the traced sizes
    into: Into | None = None
    keeps_nothing: bool = False  # after it has run, only its result may refer to its inputs


_NO_PROMISE = Operation()
_registered: dict[Any, Operation] = {}


def sparse_bytes(node: fx.Node) -> int | None:
    """Return the bytes of a sparse result whose values a trace does not show; None for other operations."""
    is_sparse = node.target is aten._embedding_bag_backward.default and node.args[9]  # its argument `sparse`
    if not is_sparse:
        return None
    gradient, indices = (value.meta["val"] for value in node.all_input_nodes[:2])
    rows, width = tensor_state.int_hint(indices.numel()), tensor_state.int_hint(gradient.shape[-1])
    itemsize: int = gradient.dtype.itemsize
    return rows * width * itemsize


def register(function: Callable[..., Any], operation: Operation) -> None:
    """Register the properties of a function that stands in joint graphs."""
    _registered[function] = operation


def operation_named(target: Any) -> Operation:
    """Return the registered properties of a node's target, or the defaults."""
    return _registered.get(target, _NO_PROMISE) if callable(target) else _NO_PROMISE


def planned_device(joint: fx.GraphModule) -> torch.device:
    """Return the device that holds most bytes of the inputs."""
    by_device = Counter[torch.device]()
    for value in (node.meta.get("val") for node in joint.graph.find_nodes(op="placeholder")):
        if tensor_state.is_dense(value):
            by_device[value.device] += tensor_state.int_hint(value.untyped_storage().nbytes())
    return by_device.most_common(1)[0][0] if by_device else torch.device("cpu")


def is_part(node: fx.Node) -> bool:
    """Whether a node only picks one output of a computation with several outputs."""
    source = node.args[0] if node.args else None
    return (
        node.target is operator.getitem
        and isinstance(source, fx.Node)
        and isinstance(source.meta.get("val"), (tuple, list, dict))
    )


def computations(joint: fx.GraphModule) -> list[fx.Node]:
    """List the nodes that compute, in order."""
    return [n for n in joint.graph.nodes if n.op in ("call_function", "call_method", "call_module") and not is_part(n)]


def values_of(node: fx.Node) -> list[fx.Node]:
    """List the values of a computation: the node itself, or the used parts of its tuple."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list, dict)):
        order: list[Any] = list(value if isinstance(value, dict) else range(len(value)))
        return sorted(filter(is_part, node.users), key=lambda part: order.index(part.args[1]))
    return [] if value is None else [node]


def operation_of(node: fx.Node) -> fx.Node:
    """Return the computation that makes a value: the node itself, or the source of a part."""
    return source_of(node) if is_part(node) else node


def source_of(node: fx.Node) -> fx.Node:
    """Return the first argument of a node, which must be a node."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def origin_of(node: fx.Node) -> dict[str, Any]:
    """Return the metadata on the module and source line of a node."""
    return {key: node.meta[key] for key in _ORIGIN if key in node.meta}


def replace_node(node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> None:
    """Replace the operation that computes a value."""
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, args, kwargs)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def show_as(node: fx.Node, shown: torch.Tensor) -> None:
    """Replace the fake tensor of a node, and also that in the tuple of its computation if the node is a part."""
    node.meta["val"] = shown
    if is_part(node):
        tupled, position = source_of(node), node.args[1]
        tupled.meta["val"] = tuple(shown if i == position else v for i, v in enumerate(tupled.meta["val"]))


def drop_unread(graph: fx.Graph) -> None:
    """Erase unread operations without effects; faster than fx, which checks the effects of all nodes."""
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure():
            graph.erase_node(node)


def reached(begin: Iterable[fx.Node], along: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """Return the given nodes and all nodes reached from them; `along` returns the neighbours of a node."""
    nodes, stack = set[fx.Node](), list(begin)
    while stack:
        node = stack.pop()
        if node not in nodes:
            nodes.add(node)
            stack.extend(along(node))
    return nodes


def reshaped(node: fx.Node) -> fx.Node | None:
    """Return the source of a `reshape` that was traced as a copy; None for other nodes."""
    copied: Any = node.args[0] if node.target is aten._unsafe_view.default else None
    is_copy = isinstance(copied, fx.Node) and copied.target is aten.clone.default and len(copied.users) == 1
    read = copied.args[0] if is_copy else None
    return read if isinstance(read, fx.Node) else None


def is_view(target: Any) -> bool:
    """Whether an operation's result shares the storage of its input."""
    return target is aten._unsafe_view.default or bool(getattr(target, "is_view", False))


def is_of_torch(target: Any) -> bool:
    """Whether an operation is an aten operator that mutates nothing; its schema tells which results are views."""
    return isinstance(target, aot.OpOverload) and target.namespace == "aten" and not target._schema.is_mutable


def is_on_new_memory(value: fx.Node) -> bool:
    """Whether a value is dense, and neither inputs nor other results of its computation share its storage."""
    if not tensor_state.is_dense(value.meta.get("val")):
        return False
    made_by = operation_of(value)
    neighbours = (*made_by.all_input_nodes, *(v for v in values_of(made_by) if v is not value))
    tensors = (t for node in neighbours for t in tensor_state.leaves(node.meta.get("val")))
    return tensor_state.storage_id(value.meta["val"]) not in tensor_state.storages_among(tensors)


def fills_memory(value: Any) -> bool:
    """Whether a value is a dense tensor that fills its whole storage, in any order of dimensions."""
    if not tensor_state.is_dense(value) or tensor_state.is_symbolic(value) or value.is_conj() or value.is_neg():
        return False
    return value.storage_offset() == 0 and value.untyped_storage().nbytes() == value.numel() * value.itemsize


def lies_as(value: Any, other: Any) -> bool:
    """Whether two values fill their storages and have equal shapes, strides, dtypes and devices."""
    if not fills_memory(value) or not fills_memory(other):
        return False
    layout = (value.shape, value.stride(), value.dtype, value.device)
    return layout == (other.shape, other.stride(), other.dtype, other.device)


def show_the_same(value: Any, other: Any) -> bool:
    """Whether two dense values without symbolic sizes show the same elements of one storage in the same order."""
    if not all(tensor_state.is_dense(v) and not tensor_state.is_symbolic(v) for v in (value, other)):
        return False
    one, another = (
        (tensor_state.storage_id(v), v.storage_offset(), v.shape, v.stride(), v.dtype, v.is_conj(), v.is_neg())
        for v in (value, other)
    )
    return one == another


def unsettled_among(tangents: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the tangents that may arrive with other strides than traced: all with dimensions."""
    return {tangent for tangent in tangents if getattr(tangent.meta.get("val"), "shape", ())}


def note_unsettled(node: fx.Node, unsettled: set[fx.Node]) -> None:
    """Add an operation's results to `unsettled` if they may have other strides than traced."""
    reads_unsettled = any(a in unsettled for a in node.all_input_nodes)
    follows_strides = reads_unsettled and (
        torch.Tag.pointwise in getattr(node.target, "tags", ())
        or node.target in _FOLLOWS_STRIDES
        or operation_named(node.target).into is Into.FIRST
        or not any(map(is_on_new_memory, values_of(node)))
    )
    if follows_strides or may_lie_otherwise(node):
        unsettled.update(values_of(node))


def may_lie_otherwise(node: fx.Node) -> bool:
    """Whether an operation's results may have other strides than traced even if its inputs have the traced ones."""
    formats = _TRACED_OTHERWISE.get(node.target)
    if formats is None or tensor_state.is_symbolic(node.meta["val"]):
        return False
    values = (*tensor_state.leaves(node.meta["val"]), *(a.meta.get("val") for a in node.all_input_nodes))
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    large = [t for t in tensors if t.dim() > 1 and 2 * t.numel() >= tensors[0].numel()]  # ignore small statistics
    return not any(all(t.is_contiguous(memory_format=form) for t in large) for form in formats)


def has_definite_strides(value: torch.Tensor) -> bool:
    """Whether a tensor's strides follow from the positions of its elements: no dimension is symbolic or has size 1.

    In such dimensions a trace may have other strides than kernels return, and products may round by them.
    """
    return not tensor_state.is_symbolic(value) and 1 not in value.shape


def mutated_arguments(node: fx.Node) -> list[fx.Node]:
    """List the arguments that an operator writes to according to its schema."""
    if not isinstance(node.target, aot.OpOverload):
        return []
    places = operators.written_arguments(node.target)
    written = [node.args[i] if i < len(node.args) else node.kwargs.get(name) for i, name in places]
    return [value for value in tensor_state.leaves(written) if isinstance(value, fx.Node)]


def written_values(joint: fx.GraphModule) -> list[fx.Node]:
    """List the values that a step writes to: by nodes of the graph, or by copies into inputs at its end."""
    in_graph = (argument for node in joint.graph.nodes for argument in mutated_arguments(node))
    return [*aot.overwritten_inputs(joint.graph), *in_graph]


def written_storages(joint: fx.GraphModule) -> set[int]:
    """Return the identities of the fake storages that a step writes to."""
    return tensor_state.storages_among(node.meta.get("val") for node in written_values(joint))


def updates_under_checkpoint(joint: fx.GraphModule) -> bool:
    """Whether code in `torch.utils.checkpoint` changes inputs, for example running statistics of a batch norm."""
    copies = joint.graph.find_nodes(op="call_function", target=aten.copy_.default)
    written = [value for to, value, *_ in (node.args for node in copies) if to.op == "placeholder"]
    return any(isinstance(value, fx.Node) and aot.checkpoint_of(operation_of(value)) is not None for value in written)


def forward_nodes(joint: fx.GraphModule, outputs: Sequence[Any]) -> set[fx.Node]:
    """Return the nodes that must run in the forward: inputs of its outputs, and side effects of eager's forward."""
    of_tangents = reached(filter(aot.is_tangent, joint.graph.nodes), attrgetter("users"))
    roots = [n for n in outputs if isinstance(n, fx.Node)]
    for node in computations(joint):
        checks_values = isinstance(node.target, aot.OpOverload) and not node.target._schema.returns
        has_effect = bool(mutated_arguments(node)) or is_random(node, None) or checks_values
        if has_effect and node not in of_tangents and not aot.is_of_backward(node):
            roots.append(node)
    return reached(roots, attrgetter("all_input_nodes"))


def halves(joint: fx.GraphModule, outputs: Sequence[Any]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the computations of the forward, which returns `outputs`, and those of the backward, each in order.

    Backward nodes that depend on gradients, draw random numbers or write to tensors keep their traced order. All others
    move to just before their first use.
    """
    of_forward, operations = forward_nodes(joint, outputs), computations(joint)
    backward = [node for node in operations if node not in of_forward]
    members, dependent = set(backward), reached(filter(aot.is_tangent, joint.graph.nodes), attrgetter("users"))
    order: dict[fx.Node, None] = {}

    def place(root: fx.Node) -> None:
        stack = [root]
        while stack:
            node = stack[-1]
            sources = [operation_of(a) for a in node.all_input_nodes]
            missing = [s for s in sources if s in members and s not in order]
            if missing and node not in order:
                stack.extend(reversed(missing))
                continue
            order.setdefault(stack.pop())

    anchored = [n for n in backward if n in dependent or mutated_arguments(n) or is_random(n, None)]
    for node in (*anchored, *backward):
        place(node)
    return [node for node in operations if node in of_forward], list(order)


def is_order_dependent_on_gpu(op: str) -> bool:
    """Whether an operator, by its qualified name, may differ in the last bit from run to run on a GPU."""
    return bool(_ORDER_DEPENDENT_ON_GPU.match(op))


def is_collective(op: str) -> bool:
    """Whether an operator, by its qualified name, communicates with other processes."""
    return op.partition(".")[0] in _COLLECTIVE


def may_choose_anew(ops: Iterable[str], device: torch.device) -> bool:
    """Whether cuDNN may choose another algorithm for one of these operators: it times them once per thread."""
    return device.type == "cuda" and torch.backends.cudnn.benchmark and "aten.convolution.default" in ops


def is_random(node: fx.Node, device: torch.device | None) -> bool:
    """Whether a second run of a node may give other numbers, or hang."""
    if getattr(node.target, "namespace", "") in _COLLECTIVE:
        return True
    if isinstance(node.target, aot.HigherOrderOperator):
        name = name_of(node.target)
        if name in CALLS_AN_OPERATOR:
            return torch.Tag.nondeterministic_seeded in getattr(node.args[0], "tags", ())
        if name not in _CALLS_SUBGRAPHS:
            return name != TRITON
        called = [inner for graph in subgraphs_of(node).values() for inner in computations(graph)]
        return any(mutated_arguments(inner) or is_random(inner, device) for inner in called)
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        if device is None or device.type != "cuda":
            return False
        is_transposed = node.target is aten.convolution.default and node.args[6]
        sums_in_any_order = is_transposed and not torch.backends.cudnn.deterministic
        return bool(sums_in_any_order) or is_order_dependent_on_gpu(str(node.target))
    # Attention operators have the random tag even without dropout.
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments]
    if "dropout_p" not in names:
        return True
    position = names.index("dropout_p")
    probability = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return bool(probability != 0.0)


def subgraphs_of(node: fx.Node) -> dict[fx.Node, fx.GraphModule]:
    """Return the graphs that a higher-order operator gets as arguments, keyed by their `get_attr` nodes."""
    attributes = {a: attribute_of(a) for a in node.all_input_nodes if a.op == "get_attr"}
    return {a: value for a, value in attributes.items() if isinstance(value, fx.GraphModule)}


def attribute_of(node: fx.Node) -> Any:
    """Return the constant or graph of a `get_attr` node; None if no module owns the node's graph."""
    owner = node.graph.owning_module
    return None if owner is None else attrgetter(str(node.target))(owner)


def name_of(target: Any) -> str:
    """Return the name of a node's target, which is equal in all processes."""
    return f"hiremate.{target.__name__}" if inspect.isfunction(target) else str(target)
