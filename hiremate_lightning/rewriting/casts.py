"""Autocast in the joint graph: each parameter cast once in a block, as in eager PyTorch, and norms of mixed types.

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

from ..torch_private import aot, autocasting, tensor_state
from .contributions import TermCounts, arrivals
from .nodes import show_as, values_of

aten = torch.ops.aten

Source = tuple[int, str]  # of a traced node: the graph of the captured node that made it, and the name of that node
BLOCK_AROUND = 0  # the number of the block of autocast around the call
_CASTS_BY_HAND = tuple(("call_method", name) for name in ("to", "type", "type_as", "bfloat16", "half"))


def outermost_autocasts(module: fx.GraphModule) -> dict[Source, int]:
    """Number the blocks of autocast that are within no other, by the nodes in them that run where casts are remembered.

    Only the block around the call is number `BLOCK_AROUND`. The body of a call, of `torch.utils.checkpoint` say, runs
    where it is called; Dynamo makes one for each call.
    """
    blocks, outside, number = dict[Source, int](), autocasting.open_blocks(), BLOCK_AROUND
    remembers = [torch.is_autocast_cache_enabled()]  # in each open block, the innermost last

    def walk(code: fx.GraphModule) -> None:
        nonlocal number
        for node in code.graph.nodes:
            is_inside = outside + len(remembers) > 1
            if node.target is autocasting.ENTER:
                number += not is_inside
                remembers.append(remembers[-1] if node.args[-1] is None else node.args[-1])
            elif node.target is autocasting.LEAVE:
                remembers.pop()
            elif is_inside and remembers[-1] and (node.op, node.target) not in _CASTS_BY_HAND:
                blocks[id(code.graph), node.name] = number
            names = [str(value.target) for value in node.all_input_nodes if value.op == "get_attr"]
            for body in (getattr(code, name, None) for name in names):
                if isinstance(body, fx.GraphModule):  # the code that an operator is called with
                    walk(body)

    walk(module)
    return blocks


def share(
    joint: fx.GraphModule, forward_outputs: int, parameters: Collection[int], blocks: Mapping[Source, int]
) -> TermCounts:
    """Cast each parameter once in a block of autocast, and add up its gradients in that type.

    Parameters are positions among the inputs, blocks those of `outermost_autocasts`.

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
            like = (primal.meta["val"].shape, primal.meta["val"].dtype)
            ends = {n for cast in (first, *others) for n in backwards.get(cast.meta["seq_nr"], ())}
            # A cast without gradients has the number of what comes after it.
            terms = sorted(n for n in ends if (n.meta["val"].shape, n.meta["val"].dtype) == like)
            gradient = dict(aot.inputs_with_gradients(joint, forward_outputs))[primal]
            if gradient is None or _add_up_before_casting(terms, gradient):
                for cast in others:
                    cast.replace_all_uses_with(first)
                    joint.graph.erase_node(cast)
        if len(primal.users) == 1 and [block for _, block in casts] == [BLOCK_AROUND]:
            cast_around[position] = sum(map(len, casts.values()))
    return cast_around


def leave_out(joint: fx.GraphModule, forward_outputs: int, positions: Sequence[int]) -> None:
    """Leave out the casts of gradients to the types of the inputs at some positions, which take gradients of any type.

    Autograd does not cast such gradients. A trace does: its cast has the number of the operation before it.
    """
    if not positions:
        return
    casts = _casts(joint)
    written = {cast.meta.get("seq_nr") for cast in casts if not cast.meta.get("autograd_backward")}
    added = {c for c in casts if c.meta.get("autograd_backward") and c.meta["seq_nr"] not in written}
    gradients = [gradient for _, gradient in aot.inputs_with_gradients(joint, forward_outputs)]
    for gradient in (gradients[position] for position in positions):
        arrived: list[Any] = arrivals(gradient) or [(gradient, gradient)]
        (first, _), *others = [(term.args[0] if term in added else term, at) for term, at in arrived]
        total = _sum(first, others)
        if gradient is not None and total is not gradient:
            gradient.replace_all_uses_with(total, delete_user_cb=lambda user: user.op == "output")


def _casts(joint: fx.GraphModule) -> list[fx.Node]:
    return list(joint.graph.find_nodes(op="call_function", target=aten._to_copy.default))


def _block_of(node: fx.Node, blocks: Mapping[Source, int]) -> int | None:
    """Return the block of autocast that made a node to cast a parameter, None for any other node."""
    is_cast = node.target is aten._to_copy.default and set(node.kwargs) == {"dtype"} and "seq_nr" in node.meta
    if not is_cast or node.kwargs["dtype"] not in tensor_state.HALF_PRECISION:
        return None
    made_by = node.meta.get("from_node")
    return blocks.get((made_by[-1].graph_id, made_by[-1].name)) if made_by else None


def _add_up_before_casting(terms: Sequence[fx.Node], total: fx.Node) -> bool:
    """Add up gradients before they are cast, not after; return whether that is how it is now.

    What is not just a sum of them and others is left alone. The last one is the first cast's, which autograd runs where
    eager's only one runs.
    """
    arrived = arrivals(total)
    if len(terms) < 2 or not set(terms) <= {term for term, _ in arrived} or any(len(t.users) != 1 for t in terms):
        return False

    half = _sum(terms[0].args[0], [(term.args[0], term) for term in terms[1:]])
    with total.graph.inserting_before(terms[-1]):
        whole = total.graph.call_function(aten._to_copy.default, (half,), dict(terms[-1].kwargs))
    whole.meta = dict(terms[-1].meta)
    (first, _), *others = [(whole if t is terms[-1] else t, at) for t, at in arrived if t not in terms[:-1]]
    total.replace_all_uses_with(_sum(first, others))
    for node in (*(at for _, at in reversed(arrived[1:])), *terms):
        total.graph.erase_node(node)
    return True


def _sum(total: Any, terms: Sequence[tuple[Any, fx.Node]]) -> Any:
    """Add terms to a value, each before a node, which gives the addition its origin."""
    for term, origin in terms:
        with origin.graph.inserting_before(origin):
            node = origin.graph.call_function(aten.add.Tensor, (total, term))
        values = (total.meta["val"], term.meta["val"])
        with tensor_state.fake_mode_of(values):
            node.meta = {**origin.meta, "is_gradient_acc": True, "val": aten.add.Tensor(*values)}
        total = node
    return total


# ---------------------------------------------------------------- norms of mixed types

# Positions of the parameters among the arguments. The first one that is given decides the type of the statistics.
_PARAMETERS = {
    aten.native_layer_norm.default: (2, 3),
    aten.native_group_norm.default: (1, 2),
    aten.native_batch_norm.default: (1, 2, 3, 4),
    aten._native_batch_norm_legit_functional.default: (1, 2, 3, 4),
    aten._native_batch_norm_legit.no_stats: (1, 2),
}
_STATISTICS = (1, 2)  # positions among the results


def show_types_of_norms(joint: fx.GraphModule) -> None:
    """Correct the types in a joint graph."""
    for target, positions in _PARAMETERS.items():
        for norm in joint.graph.find_nodes(op="call_function", target=target):
            parameters = [norm.args[position] for position in positions]
            dtype = next((p.meta["val"].dtype for p in parameters if isinstance(p, fx.Node)), None)
            if dtype is not None and _is_half_on_cpu(norm.args[0]):
                _show_in(dtype, norm, _STATISTICS)
    for backward in joint.graph.find_nodes(op="call_function", target=aten.native_group_norm_backward.default):
        source: Any = backward.args[1]
        if _is_half_on_cpu(source):
            dtype = source.meta["val"].dtype
            for gradient in _show_in(dtype, backward, (0,)):
                for cast in [u for u in gradient.users if u.target is aten._to_copy.default]:
                    if cast.kwargs == {"dtype": dtype}:
                        cast.replace_all_uses_with(gradient)
                        joint.graph.erase_node(cast)


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
