"""Autocast in the joint graph: cast each parameter once per block, as eager PyTorch does; correct norms of mixed types.

Eager autocast caches the cast parameters until its outermost block ends, so that the gradients of all uses are added up
in half precision and cast back once. In a trace each use has its own cast, and the gradients are added up in single
precision, as with `torch.compile`. This pass brings the joint graph into eager's form.

On the CPU, norms take inputs in half precision with parameters in single precision. PyTorch's kernels return statistics
in single precision and the input's gradient in half precision. Traces have other types: statistics in half precision,
and a group norm's gradient in single precision with a cast to half. This pass sets the type that the kernel returns for
each value, and removes that cast, which would be a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..torch_private import aot, autocasting, tensor_state
from .contributions import arrivals
from .joint import Joint, Source
from .nodes import show_as, values_of

aten = torch.ops.aten

BLOCK_AROUND = 0  # number of the autocast block that is open when the captured graph is called
_CASTS_BY_HAND = tuple(("call_method", name) for name in ("to", "type", "type_as", "bfloat16", "half"))


def outermost_autocasts(module: fx.GraphModule) -> dict[Source, int]:
    """Return the number of the outermost autocast block for each node inside of one, if autocast's cache is on there.

    The block around the captured graph has the number `BLOCK_AROUND`. The body of a higher-order call, such as
    `torch.utils.checkpoint`, is in the block of the call; Dynamo makes one body for each call.
    """
    blocks, outside, number = dict[Source, int](), autocasting.open_blocks(), BLOCK_AROUND
    remembers = [torch.is_autocast_cache_enabled()]  # whether the cache is on, for each open block; innermost last

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
                if isinstance(body, fx.GraphModule):  # the body of a higher-order call
                    walk(body)

    walk(module)
    return blocks


def share(joint: Joint) -> None:
    """Cast each parameter once per autocast block, and add up its gradients in the type of the cast.

    If a parameter is cast once and only in `BLOCK_AROUND`, other calls in that block share the cast in eager PyTorch.
    For these parameters `joint.terms_of_casts` gets the number of terms of the gradient in the type of the cast.
    """
    backwards: dict[int, list[fx.Node]] = {}
    for node in _casts(joint):
        if node.meta.get("autograd_backward"):
            backwards.setdefault(node.meta["seq_nr"], []).append(node)
    for position, (primal, _) in enumerate(joint.inputs_with_gradients()):
        uses = list(primal.users) if aot.input_position(primal) in joint.parameters else []
        casts: dict[tuple[Any, int], list[fx.Node]] = {}
        for user in uses:
            if (block := _block_of(user, joint.blocks)) is not None:
                casts.setdefault((user.kwargs["dtype"], block), []).append(user)
        for first, *repeats in casts.values():
            if not repeats:
                continue
            like = (primal.meta["val"].shape, primal.meta["val"].dtype)
            ends = {n for cast in (first, *repeats) for n in backwards.get(cast.meta["seq_nr"], ())}
            # A cast without gradients has the sequence number of the next operation, so also compare shape and dtype.
            terms = sorted(n for n in ends if (n.meta["val"].shape, n.meta["val"].dtype) == like)
            gradient = dict(joint.inputs_with_gradients())[primal]
            if gradient is None or _add_up_before_casting(terms, gradient):
                for cast in repeats:
                    cast.replace_all_uses_with(first)
                    joint.graph.erase_node(cast)
        if len(primal.users) == 1 and [block for _, block in casts] == [BLOCK_AROUND]:
            joint.terms_of_casts[position] = sum(map(len, casts.values()))


def leave_out(joint: Joint) -> None:
    """Remove the casts of the gradients of inputs that accept gradients of any type.

    Autograd does not cast such gradients, but a trace does: its cast has the sequence number of another operation.
    """
    if not joint.of_any_type:
        return
    casts = _casts(joint)
    written = {cast.meta.get("seq_nr") for cast in casts if not cast.meta.get("autograd_backward")}
    added = {c for c in casts if c.meta.get("autograd_backward") and c.meta["seq_nr"] not in written}
    gradients = [gradient for _, gradient in joint.inputs_with_gradients()]
    for gradient in (gradients[position] for position in joint.of_any_type):
        arrived: list[Any] = arrivals(gradient) or [(gradient, gradient)]
        (first, _), *rest = [(term.args[0] if term in added else term, at) for term, at in arrived]
        total = _sum(first, rest)
        if gradient is not None and total is not gradient:
            gradient.replace_all_uses_with(total, delete_user_cb=lambda user: user.op == "output")


def _casts(joint: Joint) -> list[fx.Node]:
    return list(joint.graph.find_nodes(op="call_function", target=aten._to_copy.default))


def _block_of(node: fx.Node, blocks: Mapping[Source, int]) -> int | None:
    """Return the autocast block in which a node casts a parameter; None if the node is no such cast."""
    is_cast = node.target is aten._to_copy.default and set(node.kwargs) == {"dtype"} and "seq_nr" in node.meta
    if not is_cast or node.kwargs["dtype"] not in tensor_state.HALF_PRECISION:
        return None
    made_by = node.meta.get("from_node")
    return blocks.get((made_by[-1].graph_id, made_by[-1].name)) if made_by else None


def _add_up_before_casting(terms: Sequence[fx.Node], total: fx.Node) -> bool:
    """Add up gradients before their cast instead of after it; return whether the graph was changed.

    `terms` are casts of gradients. They must be terms of the sum `total` and have no other reader. The last term stands
    where eager's only cast runs, so the new cast takes its place.
    """
    arrived = arrivals(total)
    if len(terms) < 2 or not set(terms) <= {term for term, _ in arrived} or any(len(t.users) != 1 for t in terms):
        return False

    half = _sum(terms[0].args[0], [(term.args[0], term) for term in terms[1:]])
    with total.graph.inserting_before(terms[-1]):
        whole = total.graph.call_function(aten._to_copy.default, (half,), dict(terms[-1].kwargs))
    whole.meta = dict(terms[-1].meta)
    (first, _), *rest = [(whole if t is terms[-1] else t, at) for t, at in arrived if t not in terms[:-1]]
    total.replace_all_uses_with(_sum(first, rest))
    for node in (*(at for _, at in reversed(arrived[1:])), *terms):
        total.graph.erase_node(node)
    return True


def _sum(total: Any, terms: Sequence[tuple[Any, fx.Node]]) -> Any:
    """Add terms to a value; insert each addition before the node paired with the term, with that node's metadata."""
    for term, origin in terms:
        with origin.graph.inserting_before(origin):
            node = origin.graph.call_function(aten.add.Tensor, (total, term))
        values = (total.meta["val"], term.meta["val"])
        with tensor_state.fake_mode_of(values):
            node.meta = {**origin.meta, "is_gradient_acc": True, "val": aten.add.Tensor(*values)}
        total = node
    return total


# ---------------------------------------------------------------- norms of mixed types

_NORMS = (
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
)
_STATISTICS = (1, 2)  # positions of the statistics among the results


def show_types_of_norms(joint: Joint) -> None:
    """Set the dtypes that norms on the CPU really return, and remove the casts of their gradients."""
    for norm in (node for target in _NORMS for node in joint.graph.find_nodes(op="call_function", target=target)):
        source, *parameters = tensor_state.tensors_among([node.meta["val"] for node in norm.all_input_nodes])
        if parameters and _is_half_on_cpu(source):
            _show_in(parameters[0].dtype, norm, _STATISTICS)  # the first parameter decides the dtype
    for backward in joint.graph.find_nodes(op="call_function", target=aten.native_group_norm_backward.default):
        source = backward.all_input_nodes[1].meta["val"]
        if _is_half_on_cpu(source):
            dtype = source.dtype
            for gradient in _show_in(dtype, backward, (0,)):
                for cast in [u for u in gradient.users if u.target is aten._to_copy.default]:
                    if cast.kwargs == {"dtype": dtype}:
                        cast.replace_all_uses_with(gradient)


def _is_half_on_cpu(shown: torch.Tensor) -> bool:
    return shown.device.type == "cpu" and shown.dtype in tensor_state.HALF_PRECISION


def _show_in(dtype: torch.dtype, node: fx.Node, positions: Sequence[int]) -> list[fx.Node]:
    """Set the traced dtype of the results at these positions; return the results that had another dtype."""
    parts = [part for part in values_of(node) if part.args[1] in positions and part.meta["val"].dtype != dtype]
    for part in parts:
        with tensor_state.fake_mode_of([part.meta["val"]]):
            show_as(part, part.meta["val"].to(dtype))
    return parts
