"""Reading a joint FX graph: what computes, what belongs to the forward, what draws or writes, and where values lie.

Torch traces forward and backward into one graph. Whoever rewrites it or makes records of it agrees on these facts. A
pass that puts a function of this package in the place of PyTorch's operators registers here what readers must know of
it: what plain PyTorch needs for the same, and whether it may overwrite memory.
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

# Add up, or choose among equals, in an order that a GPU does not fix: a second run may differ in the last bit, or name
# another index. The forward operators that PyTorch calls nondeterministic, in its kernels or in the documentation of
# `torch.use_deterministic_algorithms`, and to be safe other scans, modes, reductions by segment and sparse products.
_ORDER_DEPENDENT_ON_GPU = re.compile(
    r"aten\.(scatter_add|scatter_reduce|scatter\.src|scatter\.reduce|index_add|index_copy|index_put|_unsafe_index_put|"
    r"index_reduce|put|segment_reduce|histc|bincount|cumsum|cumprod|logcumsumexp|kthvalue|median|nanmedian|mode|"
    r"max_unpool2d|max_unpool3d|nll_loss2d_forward|_sparse_mm|_sparse_addmm|_cudnn_ctc_loss)\b"
)
# Higher-order operators that compute the same again, where what they call does.
_CALLS_SUBGRAPHS = {"associative_scan", "cond", "flex_attention", "invoke_subgraph", "map_impl", "scan"}
_CALLS_SUBGRAPHS |= {"while_loop", "while_loop_stack_output"}
CALLS_AN_OPERATOR = {"auto_functionalized", "auto_functionalized_v2"}  # one that writes to its arguments
TRITON = "triton_kernel_wrapper_functional"  # calls a kernel of a user
# Their operators talk to other processes: they run as often, and in the order, that these expect.
_COLLECTIVE = {"_c10d_functional", "_c10d_functional_autograd", "c10d"}
# Operators whose result has the strides of their first input, beside those that PyTorch tags as pointwise, and views.
_FOLLOWS_STRIDES = {
    aten._to_copy.default,
    aten.copy.default,
    aten.diagonal_scatter.default,
    aten.hardswish_backward.default,
    aten.index_put.default,
    aten.mish_backward.default,
    aten.select_scatter.default,
    aten.slice_scatter.default,
}
_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
# Operators whose kernels lay out their results otherwise than traces say, with the formats in which they do not, where
# all that they read has the same.
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
# Where these write into a copy of a view, PyTorch copies the view's whole storage; a trace counts the view alone.
COPIES_STORAGE = {
    aten.copy.default,
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.diagonal_scatter.default,
    aten.as_strided_scatter.default,
}
# Show the same elements in the same order.
SHAPES = (aten.view.default, aten._unsafe_view.default)
_ORIGIN = ("nn_module_stack", "stack_trace", "fwd_nn_module_stack")


class Into(Enum):
    """Which of its arguments an operation may compute into, where it is told so by the argument `out`."""

    NONE = "none"
    FIRST = "its first argument, however the others lie in memory"
    BY_ROWS = "any that looks like the result: it is made some rows after the other"


@dataclass(frozen=True, slots=True)
class Operation:
    """What a function promises that stands in a joint graph, registered by the module that puts it there."""

    plain_bytes: Callable[[fx.Node], int] = lambda node: 0  # of plain PyTorch while it runs, beside its result
    plain_reads: Callable[[fx.Node], tuple[fx.Node, ...]] = lambda node: ()  # by plain PyTorch alone
    plain_only_reads: Callable[[fx.Node], tuple[fx.Node, ...]] = lambda node: ()  # what plain PyTorch does not read
    plain_times: Callable[[fx.Node, int], int] = lambda node, position: 1  # how often as large it holds a result
    is_random: bool = False
    is_fresh: bool = False  # its results have new memory, of the size that a trace says
    into: Into = Into.NONE
    keeps_nothing: bool = False  # once it has run, nothing but its result refers to what it is given
    follows_strides: bool = False  # its result lies in memory as its first argument does


_NO_PROMISE = Operation()
_registered: dict[Any, Operation] = {}


def register(function: Callable[..., Any], operation: Operation) -> None:
    """Register what a function promises that stands in joint graphs."""
    _registered[function] = operation


def operation_named(target: Any) -> Operation:
    """Return what is promised of a node's target."""
    return _registered.get(target, _NO_PROMISE) if callable(target) else _NO_PROMISE


def planned_device(joint: fx.GraphModule) -> torch.device:
    """Find the device that holds most of the inputs' bytes."""
    by_device = Counter[torch.device]()
    for value in (node.meta.get("val") for node in joint.graph.find_nodes(op="placeholder")):
        if tensor_state.is_dense(value):
            by_device[value.device] += tensor_state.int_hint(value.untyped_storage().nbytes())
    return by_device.most_common(1)[0][0] if by_device else torch.device("cpu")


def is_part(node: fx.Node) -> bool:
    """Whether a node only picks one output of a computation with several."""
    source = node.args[0] if node.args else None
    return (
        node.target is operator.getitem
        and isinstance(source, fx.Node)
        and isinstance(source.meta.get("val"), (tuple, list, dict))
    )


def computations(joint: fx.GraphModule) -> list[fx.Node]:
    """List what computes, in order."""
    return [n for n in joint.graph.nodes if n.op in ("call_function", "call_method", "call_module") and not is_part(n)]


def values_of(node: fx.Node) -> list[fx.Node]:
    """List what a computation hands on: itself, or the parts that are used of a tuple."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list, dict)):
        order: list[Any] = list(value if isinstance(value, dict) else range(len(value)))
        return sorted(filter(is_part, node.users), key=lambda part: order.index(part.args[1]))
    return [] if value is None else [node]


def operation_of(node: fx.Node) -> fx.Node:
    """Return the computation whose value, or part of whose value, a node is."""
    return source_of(node) if is_part(node) else node


def source_of(node: fx.Node) -> fx.Node:
    """Return the first argument of a node, a value."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def origin_of(node: fx.Node) -> dict[str, Any]:
    """Return the metadata that tells where a node comes from."""
    return {key: node.meta[key] for key in _ORIGIN if key in node.meta}


def replace_node(node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> None:
    """Replace the operation that computes a value."""
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, args, kwargs)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def show_as(node: fx.Node, shown: torch.Tensor) -> None:
    """Replace what shows a value, also among the results of the computation whose part it is."""
    node.meta["val"] = shown
    if is_part(node):
        tupled, position = source_of(node), node.args[1]
        tupled.meta["val"] = tuple(shown if i == position else v for i, v in enumerate(tupled.meta["val"]))


def drop_unread(graph: fx.Graph) -> None:
    """Erase operations that have no effects and that nothing reads; fx asks all nodes for effects, which takes long."""
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure():
            graph.erase_node(node)


def reached(begin: Iterable[fx.Node], along: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """List nodes and all that is reached from them, along their users or what they read."""
    nodes, stack = set[fx.Node](), list(begin)
    while stack:
        node = stack.pop()
        if node not in nodes:
            nodes.add(node)
            stack.extend(along(node))
    return nodes


def reshaped(node: fx.Node) -> fx.Node | None:
    """Return the value that a node copies into another shape, as `reshape` is traced; None for other nodes."""
    copied: Any = node.args[0] if node.target is aten._unsafe_view.default else None
    is_copy = isinstance(copied, fx.Node) and copied.target is aten.clone.default and len(copied.users) == 1
    read = copied.args[0] if is_copy else None
    return read if isinstance(read, fx.Node) else None


def is_view(target: Any) -> bool:
    """Whether an operation's result lies on the memory of what it reads."""
    return target is aten._unsafe_view.default or bool(getattr(target, "is_view", False))


def is_of_torch(target: Any) -> bool:
    """Whether an operation is one of PyTorch's own, and writes to nothing: its schema says what lies on its inputs."""
    return isinstance(target, aot.OpOverload) and target.namespace == "aten" and not target._schema.is_mutable


def is_on_new_memory(value: fx.Node) -> bool:
    """Whether a dense value lies on memory that neither its computation's inputs nor other results of it have."""
    if not tensor_state.is_dense(value.meta.get("val")):
        return False
    made_by = operation_of(value)
    others = (*made_by.all_input_nodes, *(v for v in values_of(made_by) if v is not value))
    around = (t for other in others for t in tensor_state.leaves(other.meta.get("val")))
    return tensor_state.storage_id(value.meta["val"]) not in tensor_state.storages_among(around)


def fills_memory(value: Any) -> bool:
    """Whether a value is a tensor that fills memory of just its size, in any order of its dimensions."""
    if not tensor_state.is_dense(value) or tensor_state.is_symbolic(value) or value.is_conj() or value.is_neg():
        return False
    return value.storage_offset() == 0 and value.untyped_storage().nbytes() == value.numel() * value.itemsize


def lies_as(value: Any, other: Any) -> bool:
    """Whether two values fill memory with the same shape, strides and type, on the same device."""
    if not fills_memory(value) or not fills_memory(other):
        return False
    layout = (value.shape, value.stride(), value.dtype, value.device)
    return layout == (other.shape, other.stride(), other.dtype, other.device)


def unsettled_among(tangents: Iterable[fx.Node]) -> set[fx.Node]:
    """List the gradients from the caller that may come with other strides than traced."""
    return {tangent for tangent in tangents if getattr(tangent.meta.get("val"), "shape", ())}


def note_unsettled(node: fx.Node, unsettled: set[fx.Node]) -> None:
    """Add an operation's results to the values that may come with other strides than traced, where they may, too."""
    reads_unsettled = any(a in unsettled for a in node.all_input_nodes)
    if (reads_unsettled and _follows_strides(node)) or may_lie_otherwise(node):
        unsettled.update(values_of(node))


def _follows_strides(node: fx.Node) -> bool:
    """Whether an operation's results lie in memory as what it reads does: element by element, a part, or a view."""
    if torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in _FOLLOWS_STRIDES:
        return True
    return operation_named(node.target).follows_strides or not any(map(is_on_new_memory, values_of(node)))


def may_lie_otherwise(node: fx.Node) -> bool:
    """Whether an operation's results may come with other strides than its trace says."""
    formats = _TRACED_OTHERWISE.get(node.target)
    if formats is None or tensor_state.is_symbolic(node.meta["val"]):
        return False
    values = (*tensor_state.leaves(node.meta["val"]), *(a.meta.get("val") for a in node.all_input_nodes))
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    large = [t for t in tensors if t.dim() > 1 and 2 * t.numel() >= tensors[0].numel()]  # statistics tell nothing
    return not any(all(t.is_contiguous(memory_format=form) for t in large) for form in formats)


def has_definite_strides(value: torch.Tensor) -> bool:
    """Whether a tensor's strides follow from where its elements lie.

    Those of dimensions of size 1 don't: a trace has others than kernels give, by which a product may be rounded.
    """
    return 1 not in value.shape


def mutated_arguments(node: fx.Node) -> list[fx.Node]:
    """List the arguments that an operator writes to, by its schema."""
    if not isinstance(node.target, aot.OpOverload):
        return []
    places = operators.written_arguments(node.target)
    given = [node.args[i] if i < len(node.args) else node.kwargs.get(name) for i, name in places]
    return [value for value in tensor_state.leaves(given) if isinstance(value, fx.Node)]


def written_values(joint: fx.GraphModule) -> list[fx.Node]:
    """List the values that a step writes to, in the graph or after the forward."""
    in_graph = (argument for node in joint.graph.nodes for argument in mutated_arguments(node))
    return [*aot.overwritten_inputs(joint.graph), *in_graph]


def written_storages(joint: fx.GraphModule) -> set[int]:
    """Find what a step writes to by the identity of fake storages."""
    return tensor_state.storages_among(node.meta.get("val") for node in written_values(joint))


def updates_under_checkpoint(joint: fx.GraphModule) -> bool:
    """Whether code inside of `torch.utils.checkpoint` changes inputs: statistics of a batch norm, for example."""
    copies = joint.graph.find_nodes(op="call_function", target=aten.copy_.default)
    written = [value for to, value, *_ in (node.args for node in copies) if to.op == "placeholder"]
    return any(isinstance(value, fx.Node) and aot.checkpoint_of(operation_of(value)) is not None for value in written)


def forward_nodes(joint: fx.GraphModule, outputs: Sequence[Any]) -> set[fx.Node]:
    """Find what must run in the forward: what its outputs need, and what has effects that plain training has there."""
    of_tangents = reached(filter(aot.is_tangent, joint.graph.nodes), attrgetter("users"))
    roots = [n for n in outputs if isinstance(n, fx.Node)]
    for node in computations(joint):
        checks_values = isinstance(node.target, aot.OpOverload) and not node.target._schema.returns
        has_effect = bool(mutated_arguments(node)) or is_random(node, None) or checks_values
        if has_effect and node not in of_tangents and not aot.is_of_backward(node):
            roots.append(node)
    return reached(roots, attrgetter("all_input_nodes"))


def halves(joint: fx.GraphModule, outputs: Sequence[Any]) -> tuple[list[fx.Node], list[fx.Node]]:
    """List what computes in the forward, which returns some outputs, and in the backward, in the order of each.

    In the backward, nodes that depend on gradients, draw random numbers or write to something keep their order. Others
    sink: they run just before their first use.
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
    """Whether an operator, by its qualified name, talks to other processes."""
    return op.partition(".")[0] in _COLLECTIVE


def may_choose_anew(ops: Iterable[str], device: torch.device) -> bool:
    """Whether cuDNN may run one of these operators by another algorithm than before: it times them, for each thread."""
    return device.type == "cuda" and torch.backends.cudnn.benchmark and "aten.convolution.default" in ops


def is_random(node: fx.Node, device: torch.device | None) -> bool:
    """Whether a second run may give other numbers, or hang."""
    if operation_named(node.target).is_random or getattr(node.target, "namespace", "") in _COLLECTIVE:
        return True
    if isinstance(node.target, aot.HigherOrderOperator):
        return _is_random_inside(node, device)
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        if device is None or device.type != "cuda":
            return False
        is_transposed = node.target is aten.convolution.default and node.args[6]
        sums_in_any_order = is_transposed and not torch.backends.cudnn.deterministic
        return bool(sums_in_any_order) or is_order_dependent_on_gpu(str(node.target))
    # Attention kernels carry the random tag even where no dropout is asked for.
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments]
    if "dropout_p" not in names:
        return True
    position = names.index("dropout_p")
    probability = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return bool(probability != 0.0)


def _is_random_inside(node: fx.Node, device: torch.device | None) -> bool:
    """Whether a higher-order operator is not known to compute the same again, or calls what is random."""
    name = name_of(node.target)
    if name in CALLS_AN_OPERATOR:
        return torch.Tag.nondeterministic_seeded in getattr(node.args[0], "tags", ())
    if name not in _CALLS_SUBGRAPHS:
        return name != TRITON
    called = [inner for graph in subgraphs_of(node).values() for inner in computations(graph)]
    return any(mutated_arguments(inner) or is_random(inner, device) for inner in called)


def subgraphs_of(node: fx.Node) -> dict[fx.Node, fx.GraphModule]:
    """Find the graphs that a higher-order operator gets as arguments, by the nodes that stand for them."""
    attributes = {a: attribute_of(a) for a in node.all_input_nodes if a.op == "get_attr"}
    return {a: value for a, value in attributes.items() if isinstance(value, fx.GraphModule)}


def attribute_of(node: fx.Node) -> Any:
    """Return the constant, or the graph, that a `get_attr` stands for; None where nothing owns its graph."""
    owner = node.graph.owning_module
    return None if owner is None else attrgetter(str(node.target))(owner)


def name_of(target: Any) -> str:
    """Name what a node calls, the same in every process."""
    return f"hiremate.{target.__name__}" if inspect.isfunction(target) else str(target)
