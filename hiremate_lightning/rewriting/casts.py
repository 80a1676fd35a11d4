"""What autocast brings about in eager PyTorch: parameters that it casts once, and norms of mixed types.

In eager PyTorch autocast remembers the parameters that it has cast until its outermost block ends, so that the
gradients of all uses are added up in half precision, and cast back once. Traced, each use has a cast of its own, and
the gradients are added up in single precision, as with `torch.compile`. Here the graph is brought into eager's form.

On a CPU there are norms of values in half precision with parameters in single precision. PyTorch's kernels keep their
statistics in single precision, and give the input a gradient in half precision. Traces say otherwise: the statistics
are in half precision, a group norm's gradient is in single precision, and is cast. Here each value is shown in the type
that its kernel makes, and that cast, a copy, is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..torch_private import aot, tensor_state
from .contributions import TermCounts, arrivals
from .joint import drop_unread, show_as, values_of

aten = torch.ops.aten


def share(
    joint: fx.GraphModule, forward_outputs: int, parameters: Collection[int], blocks: Mapping[aot.Source, int]
) -> TermCounts:
    """Cast each parameter once in a block of autocast, and add up its gradients in that type.

    Args:
        joint: Forward and backward, which are changed; gives the forward's outputs, then the gradients of all inputs.
        forward_outputs: How many outputs the forward has.
        parameters: Positions of the parameters among the inputs.
        blocks: From `aot.outermost_autocasts`.

    Returns:
        Of how many terms gradients in that type are, by position of the parameter, where it is cast in the block around
        the call only, and once: other calls in that block share the cast.
    """
    cast_around: dict[int, int] = {}
    backwards: dict[int, list[fx.Node]] = {}
    for node in _casts(joint):
        if node.meta.get("autograd_backward"):
            backwards.setdefault(node.meta["seq_nr"], []).append(node)
    for position, (primal, _) in enumerate(aot.inputs_with_gradients(joint, forward_outputs)):
        uses = list(primal.users) if aot.input_position(primal) in parameters else []
        casts: dict[tuple[Any, int], list[fx.Node]] = {}
        for user in uses:
            if (block := _block_of(user, blocks)) is not None:
                casts.setdefault((user.kwargs["dtype"], block), []).append(user)
        for first, *others in casts.values():
            if not others:
                continue
            ends = {n for cast in (first, *others) for n in backwards.get(cast.meta["seq_nr"], ())}
            terms = sorted(n for n in ends if _is_like(n, primal))
            gradient = dict(aot.inputs_with_gradients(joint, forward_outputs))[primal]
            if gradient is None or _add_up_before_casting(joint.graph, terms, gradient):
                for cast in others:
                    cast.replace_all_uses_with(first)
                    joint.graph.erase_node(cast)
        if len(primal.users) == 1 and [block for _, block in casts] == [aot.BLOCK_AROUND]:
            cast_around[position] = sum(map(len, casts.values()))
    return cast_around


def leave_out(joint: fx.GraphModule, forward_outputs: int, positions: Sequence[int]) -> None:
    """Leave out the casts of gradients to the types of their inputs, where these take gradients of any type.

    Autograd does not cast such gradients. A trace does: its cast has the number of the operation before it.

    Args:
        joint: As for `share`.
        forward_outputs: How many outputs the forward has.
        positions: Those of the inputs.
    """
    if not positions:
        return
    written = {node.meta.get("seq_nr") for node in _casts(joint) if not node.meta.get("autograd_backward")}
    added = {
        node for node in _casts(joint) if node.meta.get("autograd_backward") and node.meta["seq_nr"] not in written
    }
    gradients = [gradient for _, gradient in aot.inputs_with_gradients(joint, forward_outputs)]
    for gradient in (gradients[position] for position in positions):
        arrived: list[Any] = arrivals(gradient) or [(gradient, gradient)]
        terms = [term.args[0] if term in added else term for term, _ in arrived]
        total = terms[0]
        for term, (_, at) in zip(terms[1:], arrived[1:], strict=True):
            with joint.graph.inserting_before(at):
                total = _add(joint.graph, total, term, at)
        if gradient is not None and total is not gradient:
            gradient.replace_all_uses_with(total, delete_user_cb=lambda user: user.op == "output")
    drop_unread(joint.graph)


def _casts(joint: fx.GraphModule) -> list[fx.Node]:
    return list(joint.graph.find_nodes(op="call_function", target=aten._to_copy.default))


def _is_like(gradient: fx.Node, primal: fx.Node) -> bool:
    """Whether a node may be a gradient of an input: a cast without gradients has the number of what comes after it."""
    values = gradient.meta["val"], primal.meta["val"]
    return values[0].shape == values[1].shape and values[0].dtype is values[1].dtype


def _block_of(node: fx.Node, blocks: Mapping[aot.Source, int]) -> int | None:
    """Return the block of autocast that made a node to cast a parameter, None for any other node."""
    is_cast = node.target is aten._to_copy.default and set(node.kwargs) == {"dtype"} and "seq_nr" in node.meta
    if not is_cast or node.kwargs["dtype"] not in tensor_state.HALF_PRECISION:
        return None
    source = aot.source_of(node)
    return None if source is None else blocks.get(source)


def _add_up_before_casting(graph: fx.Graph, terms: Sequence[fx.Node], total: fx.Node) -> bool:
    """Add up gradients before they are cast, not after; return whether that is how it is now.

    What is not just a sum of them and others is left alone.

    Args:
        graph: Of the step.
        terms: The cast gradients in their order; the last one is the first cast's, which autograd runs where eager's
            only one runs.
        total: The gradient to which they are added up.
    """
    arrived = arrivals(total)
    if len(terms) < 2 or not set(terms) <= {term for term, _ in arrived} or any(len(t.users) != 1 for t in terms):
        return False

    half = terms[0].args[0]
    for term in terms[1:]:
        with graph.inserting_before(term):
            half = _add(graph, half, term.args[0], term)
    with graph.inserting_before(terms[-1]):
        whole = graph.call_function(aten._to_copy.default, (half,), dict(terms[-1].kwargs))
    whole.meta = dict(terms[-1].meta)
    (result, _), *others = [(whole if t is terms[-1] else t, at) for t, at in arrived if t not in terms[:-1]]
    for term, at in others:
        with graph.inserting_before(at):
            result = _add(graph, result, term, at)
    total.replace_all_uses_with(result)
    for node in (*(at for _, at in reversed(arrived[1:])), *terms):
        graph.erase_node(node)
    return True


def _add(graph: fx.Graph, total: Any, term: Any, origin: fx.Node) -> fx.Node:
    node = graph.call_function(aten.add.Tensor, (total, term))
    values = (total.meta["val"], term.meta["val"])
    with tensor_state.fake_mode_of(values):
        node.meta = {**origin.meta, "is_gradient_acc": True, "val": aten.add.Tensor(*values)}
    return node


# ---------------------------------------------------------------- norms of mixed types

# Positions of the parameters among the arguments. The first one that is given decides the type of the statistics.
_PARAMETERS = {
    aten.native_layer_norm.default: (2, 3),
    aten.native_group_norm.default: (1, 2),
    aten.native_batch_norm.default: (1, 2, 3, 4),
    aten._native_batch_norm_legit_functional.default: (1, 2, 3, 4),
}
_STATISTICS = (1, 2)  # positions among the results


def show_types_of_norms(joint: fx.GraphModule) -> None:
    """Correct the types in a joint graph, dead code already removed; it is changed."""
    for target, positions in _PARAMETERS.items():
        for norm in joint.graph.find_nodes(op="call_function", target=target):
            parameters = [norm.args[position] for position in positions]
            dtype = next((p.meta["val"].dtype for p in parameters if isinstance(p, fx.Node)), None)
            if dtype is not None and _is_half_on_cpu(norm.args[0]):
                _show_in(dtype, norm, _STATISTICS)
    for backward in joint.graph.find_nodes(op="call_function", target=aten.native_group_norm_backward.default):
        source: Any = backward.args[1]
        if _is_half_on_cpu(source):
            for gradient in _show_in(source.meta["val"].dtype, backward, (0,)):
                _leave_out_casts(gradient)


def _is_half_on_cpu(node: Any) -> bool:
    shown = node.meta["val"]
    return shown.device.type == "cpu" and shown.dtype in tensor_state.HALF_PRECISION


def _show_in(dtype: torch.dtype, node: fx.Node, positions: Sequence[int]) -> list[fx.Node]:
    """Show some results of an operation in a type; return those that were shown in another one."""
    parts = [part for part in values_of(node) if part.args[1] in positions and part.meta["val"].dtype != dtype]
    for part in parts:
        with tensor_state.fake_mode_of([part.meta["val"]]):
            show_as(part, part.meta["val"].to(dtype))
    return parts


def _leave_out_casts(node: fx.Node) -> None:
    """Replace the casts of a value to the type that it has."""
    for user in list(node.users):
        if user.target is aten._to_copy.default and user.kwargs == {"dtype": node.meta["val"].dtype}:
            user.replace_all_uses_with(node)
            node.graph.erase_node(user)
